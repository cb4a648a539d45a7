"""dsq-cost's memory against models that run: python -m analysis.memory.check"""
