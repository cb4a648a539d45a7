"""dsq-cost: main.py parses, commands/ give an Answer that answer.py prints, pictures/ draw."""
