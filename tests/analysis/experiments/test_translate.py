"""The recipe's parts by themselves, and the whole of it once on a corpus and a model as small as can be."""

import dataclasses
import json

import pytest

pytest.importorskip("fairseq_plugin.shims", reason="fairseq is not installed")

from analysis.corpus.generate import write
from analysis.experiments import translate
from analysis.experiments.text.parallel_text import read_parallel
from analysis.experiments.text.subwords import train_bpe, write_pieces
from analysis.experiments.training import picture
from analysis.experiments.training.fairseq_run import hypotheses, progress
from analysis.experiments.training.results import level_table, losses, summary
from analysis.experiments.training.translation import Translation

# ---- subwords and logs --------------------------------------------------------------------------------------------


def test_pieces_say_the_text_again(tmp_path):
    write(tmp_path, 200, 20, seed=1)
    text = read_parallel(tmp_path, "de", "en")
    sentences = text["train"].source + text["train"].target
    bpe = train_bpe(sentences, 300)
    assert bpe.get_piece_size() == 300
    write_pieces(text["valid"], bpe, tmp_path / "pieces", ("de", "en"))
    for side, lines in (("de", text["valid"].source), ("en", text["valid"].target)):
        pieces = (tmp_path / f"pieces.{side}").read_text().splitlines()
        assert ["".join(line.split()).replace("▁", " ").strip() for line in pieces] == lines
    with pytest.raises(ValueError, match=r"--vocab 90000: .* value <="):
        train_bpe(sentences, 90000)


def test_hypotheses_come_back_in_the_order_of_the_text(tmp_path):
    log = tmp_path / "log"
    log.write_text("S-1\tx\nD-1\t-0.1\ttwo words\nH-0\t-1\tno\nD-0\t-0.2\tone\nD-10\t-0.2\tten\n")
    assert hypotheses(log) == ["one", "two words", "ten"]


def test_a_record_behind_one_that_was_cut_off_is_read(tmp_path):
    log = tmp_path / "log"
    log.write_text(
        '12:00 | INFO | valid | {"valid_num_upd12:01 | INFO | valid | {"valid_num_updates": "3", "valid_loss": "2.5"}\n'
    )
    assert losses(log, "valid", "valid_") == [(3, 2.5)]


def test_progress_shows_validations_and_changes_of_level():
    valid = '2026-01-01 | INFO | valid | {"valid_loss": "4.1", "valid_num_updates": "25", "valid_dsq_level": "1"}'
    assert progress(valid) == "  update     25  valid loss     4.1  level 1"
    assert progress("x | INFO | t | DSQ level 0 [2,2,2,16] -> 1 [16,4,4,16] at update 9") is not None
    assert progress("x | INFO | fairseq_cli.train | done") is None


def test_a_training_that_has_ended_is_not_gone_on_with(tmp_path, monkeypatch):
    """A killed dsq-generate is: fairseq's --patience would begin to count again."""
    trained = []
    monkeypatch.setattr(translate, "fairseq", lambda command, arguments, *_, **__: trained.append(arguments[-1]))
    given = Translation(tmp_path, tmp_path, training=("--patience", "3"))
    given.checkpoints.mkdir()
    translate._train(given)
    translate._train(given)
    translate._train(dataclasses.replace(given, training=("--patience", "4")))
    assert trained == ["3", "4"]


# ---- the whole ----------------------------------------------------------------------------------------------------


SMALL = """
    --cpu --encoder-layers 1 --decoder-layers 1 --encoder-embed-dim 16 --decoder-embed-dim 16 --encoder-ffn-embed-dim 32
    --decoder-ffn-embed-dim 32 --encoder-attention-heads 2 --decoder-attention-heads 2 --validate-interval-updates 1
    --log-interval 1 --dsq-patience 1 --lr 0 --max-tokens 512"""


def test_the_recipe_from_raw_text_to_results(tmp_path, capsys):
    """Going on with it: test_run.py."""
    out = tmp_path / "run"
    write(tmp_path / "corpus", 60, 6, seed=1)
    arguments = ["--data", str(tmp_path / "corpus"), "--out", str(out), "--vocab", "250", "--beam", "1"]
    assert translate.main([*arguments, *SMALL.split(), "--max-update", "6"]) == 0
    results = json.loads((out / "results.json").read_text())
    first, last = results["history"]["levels"]
    # a learning rate of 0 cannot improve the loss: the level rises at the second validation
    assert [first["precision"], last["precision"]] == [[4, 4, 4, 8], [8, 4, 4, 8]]
    assert (first["updates"], last["updates"]) == (2, 4)
    assert results["sentences"] == {"train": 60, "valid": 6, "test": 6}
    assert 0 <= results["bleu"] <= 100
    assert 0 < results["costs"]["paper"]["dram"] < results["costs"]["first-principles"]["dram"] < 1
    assert [update for update, _ in results["valid_loss"]] == [1, 2, 3, 4, 5, 6]
    assert [line.split()[:2] for line in level_table(results).splitlines()[-2:]] == [
        ["[4,4,4,8]", "2"],
        ["[8,4,4,8]", "4"],
    ]
    assert level_table(results) in summary(results)
    assert "valid loss" in capsys.readouterr().out
    picture.draw(results, tmp_path / "run.png")
    assert (tmp_path / "run.png").read_bytes().startswith(b"\x89PNG")

    before = (out / "results.json").read_bytes()
    assert translate.main([*arguments, *SMALL.split(), "--max-update", "6"]) == 2
    assert "--resume" in capsys.readouterr().err
    assert (out / "results.json").read_bytes() == before
