"""What a precision configuration costs: DRAM bytes, multiplier work, roofline bound. Imports no torch.

Data flows one way: `workloads` (shapes) -> `operations` -> `traffic` and `arithmetic` -> `roofline` (with `hardware`)
-> `cli`. `paper` is the calibrated profile that reproduces the published tables; the rest is first principles.
"""
