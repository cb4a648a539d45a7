"""The commands of dsq-cost: functions of their names, from arguments to an answer."""
