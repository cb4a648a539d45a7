"""What users get wrong, and the one line that they are told.

limits.py     values of fairseq's own flags, refused when the command line is read
texts.py      the texts that dsq-preprocess is given
explained.py  errors of fairseq, torch and Python that come of a user's mistake
"""
