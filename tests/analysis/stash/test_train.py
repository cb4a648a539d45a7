"""Training on sentences a person could write: what is compared is equal, what is learnt is learnt."""

import pandas as pd
import pytest
import torch

from analysis.stash import train


@pytest.fixture
def data(tmp_path):
    """A film is good if it says so: 96 reviews of five, eight or three words."""
    for split, shift in (("train", 0), ("dev", 3)):
        rows = ["label\tsentence"]
        for i in range(96):
            word = ("good", "bad")[i % 2]
            film = ("a {} film for once", "the film was {} and i saw it", "very {} film")[(i + shift) % 3]
            rows.append(f"{1 - i % 2}\t{film.format(word)}")
        (tmp_path / f"films.{split}.tsv").write_text("\n".join(rows) + "\n")
    return tmp_path


def command(data, *more):
    small = ("--steps", "30", "--batch", "16", "--width", "16", "--blocks", "1", "--lr", "0.01")
    return train.main(["--data", str(data), "--task", "films", "--out", str(data / "run"), *small, *more])


def test_runs_learn_and_an_exact_policy_is_fp32_to_the_bit(data, capsys):
    assert command(data, "--runs", "fp32", "selective", "wtacrs 0.3 + bfp 4", "--seeds", "1") == 0
    rows = pd.read_csv(data / "run" / "accuracy.csv")
    assert list(rows["run"]) == ["fp32", "selective", "wtacrs 0.3 + bfp 4"]
    assert (rows["accuracy"] == 100).all()
    kept = rows.groupby("run")["stash_bytes"].mean()
    assert kept["wtacrs 0.3 + bfp 4"] < 0.3 * kept["fp32"]
    assert "minus fp32" in (data / "run" / "table.md").read_text()
    capsys.readouterr()
    assert command(data, "--runs", "fp32", "--seeds", "1") == 0  # measured before: nothing is run again
    assert "accuracy 100" not in capsys.readouterr().out


def test_the_weights_of_an_exact_policy_are_those_of_fp32(data):
    train_set, _, words, classes = train.read(data, "films")

    def weights(*policies):
        torch.manual_seed(0)
        model = train.Classifier(words, classes, width=16, blocks=1)
        for policy in policies:
            train.stash.apply(model, policy)
        train.train(model, train_set, 5, 16, 0.01, 1, None)
        return torch.cat([p.detach().flatten() for p in model.parameters()])

    assert torch.equal(weights("selective"), weights())


def test_batches_hold_every_sentence_once_and_are_of_one_length(data):
    train_set, dev, words, classes = train.read(data, "films")
    assert (words, classes, len(dev.labels)) == (1 + 13, 2, 96)
    batches = list(train_set.batches(10, seed=4))
    assert sorted(torch.cat([samples for samples, _, _ in batches]).tolist()) == list(range(96))
    assert {tuple(batch.shape)[1] for _, batch, _ in batches} == {3, 5, 8}
    again = [samples.tolist() for samples, _, _ in train_set.batches(10, seed=4)]
    assert [samples.tolist() for samples, _, _ in batches] == again
    assert [samples.tolist() for samples, _, _ in train_set.batches(10, seed=5)] != again
