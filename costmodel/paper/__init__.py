"""The cost model of the paper, calibrated on its tables, and those tables beside ours."""
