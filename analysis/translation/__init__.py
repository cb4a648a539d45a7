"""Translation models trained by fairseq's commands, from raw text to BLEU: the suite's translations and `make demo`.

demo.py      a model trained twice on the sentences of tatoeba/, in fp32 and with DSQ, in minutes
training.py  pairs of sentences -> BPE -> dsq-preprocess -> dsq-train -> dsq-generate -> BLEU
text.py      files of sentence pairs and of labelled sentences; subwords
"""
