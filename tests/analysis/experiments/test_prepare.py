"""Official archives in miniature, of the form that the real ones have."""

import zipfile
from pathlib import Path

import pytest

from analysis.experiments import prepare
from analysis.experiments.plan.experiment import load_experiment
from analysis.experiments.text.labelled import read_labelled
from analysis.experiments.text.parallel_text import read_parallel
from tests.analysis.experiments.archives import archive, segments

RECIPES = Path(prepare.__file__).parent / "recipes"


def test_iwslt17(tmp_path: Path, accept) -> None:
    members = {
        f"de-en/train.tags.de-en.{language}": f"<url>u</url>\n<title>t</title>\n {word} eins \n{word} zwei\n"
        for language, word in (("de", "Satz"), ("en", "Sentence"))
    }
    for name in ("dev2010", *(f"tst201{year}" for year in range(6))):
        for language in ("de", "en"):
            members[f"de-en/IWSLT17.TED.{name}.de-en.{language}.xml"] = segments(f"{name} {language}", "“Ja!”")
    path = archive(tmp_path / "de-en.tgz", members)
    accept("iwslt17", path)
    assert prepare.main(["iwslt17", str(path), "--out", str(tmp_path / "out")]) == 0
    text = read_parallel(tmp_path / "out", "de", "en")
    assert (text["train"].source, text["train"].target) == (
        ["Satz eins", "Satz zwei"],
        ["Sentence eins", "Sentence zwei"],
    )
    assert text["test"].source == ["tst2015 de", "“Ja!”"]
    assert text["valid"].target[::2] == ["dev2010 en", *(f"tst201{year} en" for year in range(5))]


def test_iwslt14(tmp_path: Path, accept) -> None:
    lines = [f"{number} ein Satz" for number in range(1, 47)]
    german = "\n".join(["<url>u</url>", "<title>Titel hier</title>", *lines, "viel zu lang dagegen", ""])
    english = "\n".join(["<url>u</url>", "<title>title here</title>", *lines, "short", ""])
    members = {"de-en/train.tags.de-en.de": german, "de-en/train.tags.de-en.en": english}
    for name in ("TED.dev2010", "TED.tst2010", "TED.tst2011", "TED.tst2012", "TEDX.dev2012"):
        members |= {f"de-en/IWSLT14.{name}.de-en.{language}.xml": segments(f"{name}’s") for language in ("de", "en")}
    path = archive(tmp_path / "de-en.tgz", members)
    accept("iwslt14", **{"test.de": 5})
    assert prepare.main(["iwslt14", str(path), "--out", str(tmp_path / "out")]) == 0
    text = read_parallel(tmp_path / "out", "de", "en")
    # the title is the first of 47 pairs that stay: 23 and 46 validate
    assert text["train"].source[0] == "Titel hier"
    assert text["valid"].source == ["22 ein Satz", "45 ein Satz"]
    assert (len(text["train"]), text["train"].source[-1]) == (45, "46 ein Satz")
    assert text["test"].target[0] == "TED.dev2010's"
    assert len(text["test"]) == 5


def test_wmt14(tmp_path: Path, accept) -> None:
    for name in ("train", "newstest2013", "newstest2014"):
        for language in ("en", "de"):
            (tmp_path / f"{name}.{language}").write_text(f"{name} &quot; {language} &quot; E ##AT##-##AT## Mail\n")
    accept("wmt14", **{"train.en": 1})
    assert prepare.main(["wmt14", str(tmp_path), "--out", str(tmp_path / "out")]) == 0
    text = read_parallel(tmp_path / "out", "en", "de")
    assert text["valid"].source == ['newstest2013 " en " E-Mail']
    assert text["test"].target == ['newstest2014 " de " E-Mail']


@pytest.mark.parametrize(
    "name, dev, head",
    [
        ("mnli", "dev_matched", "index\tsentence1\tsentence2\tgold_label"),
        ("qnli", "dev", "index\tquestion\tsentence\tlabel"),
    ],
)
def test_glue(tmp_path: Path, accept, name: str, dev: str, head: str) -> None:
    path = tmp_path / f"{name}.zip"
    with zipfile.ZipFile(path, "w") as made:
        for split in ("train", dev, "test"):
            made.writestr(f"{name.upper()}/{split}.tsv", f'{head}\n0\tA "word {split}\tB.\tentailment\n')
    accept(name, path)
    assert prepare.main([name, str(path), "--out", str(tmp_path / "glue")]) == 0
    for split, shown in (("train", "train"), ("dev", dev)):
        table = read_labelled(tmp_path / "glue", name, split)
        assert (table.labels, table.inputs) == (["entailment"], [[f'A "word {shown}'], ["B."]])


def test_what_is_absent_other_or_cut_short_is_one_line_and_leaves_nothing(tmp_path: Path, accept, capsys) -> None:
    def error(*given: object) -> str:
        assert prepare.main([*map(str, given), "--out", str(tmp_path / "out")]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        return line

    assert "no such file; iwslt17 is made of 2017-01-trnted/texts/de/en/de-en.tgz" in error(
        "iwslt17", tmp_path / "no.tgz"
    )
    path = archive(tmp_path / "de-en.tgz", {"de-en/train.tags.de-en.de": "eins\n"})
    assert "its SHA-256 is" in error("iwslt17", path)
    accept("iwslt17", path)
    assert "holds no file of the form IWSLT" in error("iwslt17", path)
    for cut in (3, path.stat().st_size // 2):
        (tmp_path / "cut.tgz").write_bytes(path.read_bytes()[:cut])
        assert "cut.tgz: is damaged, or not 2014-01/texts/de/en/de-en.tgz" in error("iwslt14", tmp_path / "cut.tgz")
    (tmp_path / "train.de").write_text("nur eine\n")
    assert "gives 1 lines of train.de, expected 4468840" in error("wmt14", tmp_path)
    assert not [file for file in (tmp_path / "out").rglob("*") if file.is_file()]


@pytest.mark.parametrize(
    "recipe, name",
    [
        ("iwslt14_table4_5", "iwslt14"),
        ("iwslt17_table1", "iwslt17"),
        ("wmt14_table6", "wmt14"),
        ("roberta_mnli_table1", "mnli"),
        ("roberta_qnli_table1", "qnli"),
    ],
)
def test_a_full_size_recipe_says_how_to_prepare_its_data(recipe: str, name: str) -> None:
    data = load_experiment(RECIPES / f"{recipe}.toml").data
    assert f"analysis.experiments.prepare {name} " in data.get
    assert f"--out {data.path}" in data.get
