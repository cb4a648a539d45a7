"""Translation models trained by fairseq's commands, from raw text to BLEU: the suite's translations and `make demo`."""
