from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import loopinterp
from loopinterp.adapters import TokenWords, adapt, load_published, load_tokenizer, tokenize
from loopinterp.app.lens_page import write_lens_page
from loopinterp.core.errors import CheckpointError, InputError
from loopinterp.lenses import fit_tuned_lens, lens_study
from loopinterp.pages import Exploration
from loopinterp.tasks import typed_example
from tests.adapters.published import hrm_text, ouro
from tests.cli.test_cli import Command, assert_refused, command
from tests.small_studies import fit_little

__all__ = ["command"]

HOSTILE = ["</script>", "<img/src=x>", "\u202eback", "a\x07b", "\ud7ff", "'\"`${1}"]

WORDS = ["the", "cat", "sat", "on", "mat", ".", *HOSTILE]

OURO = """
from transformers import PretrainedConfig, PreTrainedModel
from loopinterp.adapters.plain.language_models import OuroConfig, OuroRotaryEmbedding
from tests.adapters.published import ouro


class TinyConfig(PretrainedConfig):
    model_type = "tiny_ouro"


class TinyOuro(PreTrainedModel):
    config_class = TinyConfig

    def __init__(self, config):
        super().__init__(config)
        module = ouro.tiny()
        self.model, self.lm_head = module.model, module.lm_head
        self.post_init()

    def _init_weights(self, module):
        if hasattr(module, "inv_freq"):  # it is in no file
            module.inv_freq.copy_(OuroRotaryEmbedding(OuroConfig()).inv_freq)
"""


def save_tokenizer(folder: Path) -> None:
    known = {word: k for k, word in enumerate(["?", *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(known, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="?").save_pretrained(folder)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny HRM-Text with a tokenizer of a few words."""
    folder = tmp_path_factory.mktemp("published") / "hrm-text"
    hrm_text.tiny().save_pretrained(folder)
    save_tokenizer(folder)
    return folder


@pytest.fixture
def with_own_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tiny Ouro whose code lies beside its weights."""
    monkeypatch.setattr(
        "transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules")
    )
    folder = tmp_path / "ouro"
    save_tokenizer(folder)
    (folder / "modeling_tiny.py").write_text(OURO)
    classes = {"AutoConfig": "TinyConfig", "AutoModelForCausalLM": "TinyOuro"}
    own = {name: f"modeling_tiny.{kind}" for name, kind in classes.items()}
    config = {"model_type": "tiny_ouro", "architectures": ["TinyOuro"], "auto_map": own}
    (folder / "config.json").write_text(json.dumps(config))
    from safetensors.torch import save_file

    weights = {k: x.clone() for k, x in ouro.tiny(seed=5).state_dict().items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def reads_the_same(found: Exploration, model: Any, tokens: Any, lens: Any) -> None:
    read = lens_study(model, tokens, lens=lens, n_loops=found.data.sizes["loop"] - 1, inside=True)
    state = read.data.sel(layer="state").transpose("batch", "loop", "pos", ...)
    np.testing.assert_array_equal(found.data["answer"][..., 0], state["answer"])
    inner = read.data.isel(layer=slice(0, -2)).transpose("batch", "loop", "layer", "pos", ...)
    np.testing.assert_array_equal(found.data["inner_answer"], inner["answer"])


@pytest.mark.parametrize("lens", ["coda", "logit"])
def test_a_published_model_reads_any_text(
    lens: str, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    prompt = "the cat sat on the dog"
    page, found = write_lens_page(checkpoint, prompt, lens=lens, n_loops=3)
    assert page.resolve() == tmp_path / "lens.html"
    assert found.tokens == [["the", "cat", "sat", "on", "the", "?"]]
    model = load_published(str(checkpoint))
    tokens = tokenize(load_tokenizer(str(checkpoint)), prompt)
    reads_the_same(found, model, tokens, lens)
    answers = found.data["answer"].values.ravel().tolist()
    known = ["?", *WORDS]
    assert all(
        found.symbols[str(c)] == (known[c].strip() if c < len(known) else str(c)) for c in answers
    )
    assert (found.data["target"] == -1).all()
    assert f"hrm-text: {prompt}" in page.read_text()
    assert found.data.sizes["loop"] == 4 and found.data.sizes["inner"] == 7


def test_without_loops_it_makes_its_own(checkpoint: Path, tmp_path: Path) -> None:
    _, found = write_lens_page(checkpoint, "cat", out=tmp_path / "a.html")
    assert found.data.sizes["loop"] == 1 + hrm_text.tiny().config.H_cycles


def test_hostile_tokens_are_text(checkpoint: Path, tmp_path: Path) -> None:
    prompt = " ".join(HOSTILE)
    page, found = write_lens_page(checkpoint, prompt, out=tmp_path / "a.html")
    assert found.tokens == [HOSTILE]
    text = page.read_text()
    assert "<img" not in text
    scripts = re.findall(r"<script\b[^>]*>(.*?)</script>", text, re.DOTALL)
    assert text.count("</script>") == text.count("<script") == len(scripts)
    data = next(json.loads(x) for x in scripts if x.lstrip().startswith('{"asks"'))
    assert data["examples"][0]["tokens"] == HOSTILE


def test_a_file_of_a_fitted_lens_is_read_through(checkpoint: Path, tmp_path: Path) -> None:
    model, tokens = load_published(str(checkpoint)), torch.randint(12, (8, 5))
    lens = fit_tuned_lens(model, tokens, n_loops=2, inside=True, steps=2)
    file = lens.save(tmp_path / "mine.safetensors")
    _, found = write_lens_page(checkpoint, "the cat sat", lens=file, out=tmp_path / "a.html")
    assert found.lens == "tuned" and found.data.sizes["loop"] == 3
    read = tokenize(load_tokenizer(str(checkpoint)), "the cat sat")
    reads_the_same(found, model, read, lens)


def test_the_code_beside_a_model_is_run_only_if_that_is_said(
    with_own_code: Path, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match="trust_remote_code"):
        write_lens_page(with_own_code, "the cat", out=tmp_path / "a.html")
    assert not (tmp_path / "a.html").exists()
    _, found = write_lens_page(
        with_own_code, "the cat", out=tmp_path / "a.html", trust_remote_code=True, lens="logit"
    )
    model = adapt(ouro.tiny(seed=5))
    reads_the_same(found, model, torch.tensor([[1, 2]]), "logit")
    assert found.data.sizes["loop"] == 5


@pytest.mark.parametrize("lens", ["tuned", "jacobian"])
def test_a_model_of_the_zoo_and_a_lens_that_is_fitted_first(
    lens: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fit_little(monkeypatch)
    monkeypatch.chdir(tmp_path)
    page, found = write_lens_page("parity", "1 0 1", lens=lens, progress=False)
    assert page.resolve() == tmp_path / "lens.html" and found.lens == lens
    run = loopinterp.zoo.pretrained_run("parity")
    prompt = typed_example(run.task, "1 0 1")
    read = lens_study(run.model().eval(), prompt, lens=lens)  # type: ignore[arg-type]
    state = read.data.sel(layer="state").transpose("batch", "loop", "pos", ...)
    np.testing.assert_array_equal(found.data["answer"][..., 0], state["answer"])
    assert {"tuned": "The tuned lens", "jacobian": "The Jacobian lens"}[lens] in page.read_text()


def test_on_the_command_line(
    command: Command, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    page = tmp_path / "page.html"
    asked = ("lens", checkpoint, "--prompt", "the cat", "--out", page)
    answer = command(*asked, "--lens", "logit", "--loops", "2", "--json").json
    assert answer["tokens"] == ["the", "cat"] and answer["lens"] == "logit"
    assert "Loading" not in command(*asked, "--no-progress").err
    assert "final reading" in command(*asked).out  # not a lens
    for lens in ("tuned", "jacobian"):
        refused = command(*asked, "--lens", lens)
        assert_refused(refused, "lens: expected logit, coda, or the file", "fit_tuned_lens")
    assert_refused(command(*asked, "--lens", "logits"), "got 'logits'")
    assert_refused(command("lens", "hf:no/such", "--prompt", "a", "--device", "tpu"), "device")
    (tmp_path / "runs").mkdir()
    for name in ("runs/ad", "additon", "a/b/c", "./x"):
        assert_refused(
            command("lens", name, "--prompt", "a"), "model: expected the folder of a run"
        )
    assert_refused(command("lens", "runs", "--prompt", "a"), "a folder without config.json")
    assert_refused(command("lens", checkpoint, "--prompt", "  "), "one token or more")
    wide = command("lens", "addition", "--prompt", "1 + 1", "--trust-remote-code")
    assert_refused(wide, "trust_remote_code")


@pytest.mark.parametrize("broken", ["config.json", "model.safetensors", "tokenizer.json"])
def test_what_is_damaged_is_one_message(
    broken: str, command: Command, checkpoint: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "copy"
    folder.mkdir()
    for file in checkpoint.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    (folder / broken).write_bytes(b'{"model_type": 3')
    assert_refused(command("lens", folder, "--prompt", "a"))
    (folder / broken).unlink()
    assert_refused(command("lens", folder, "--prompt", "a"))


def test_a_published_model_without_adapter_says_what_there_is(
    command: Command, checkpoint: Path, tmp_path: Path
) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes: dict[str, Any] = {"n_embd": 8, "n_layer": 1, "n_head": 1, "vocab_size": 20}
    GPT2LMHeadModel(GPT2Config(**sizes)).save_pretrained(tmp_path / "gpt2")
    save_tokenizer(tmp_path / "gpt2")
    refused = command("lens", tmp_path / "gpt2", "--prompt", "the cat")
    assert_refused(refused, "an adapter: Ouro, Huginn, HRMText", "GPT2LMHeadModel")


def test_words_of_tokens() -> None:
    class Pieces:
        """Bytes of which two make a letter."""

        def convert_ids_to_tokens(self, token: int) -> str | None:
            return ["Ġcat", "Ã", "Ċ", "Ġ", "", None][token]

        def decode(self, tokens: list[int]) -> str:
            return [" cat", "\ufffd", "\n", " ", "", ""][tokens[0]]

    words = TokenWords(Pieces(), 6)
    assert list(words) == ["cat", "Ã", "\\n", "␣", "", "5"]
    assert words[-1] == "5" and words[:2] == ["cat", "Ã"] and len(words) == 6
    with pytest.raises(IndexError):
        words[6]


def test_a_lens_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(CheckpointError):
        write_lens_page("parity", "1", lens=tmp_path / "notes.txt", out=tmp_path / "a.html")


@pytest.mark.parametrize("prompt", ["the \udcff", "\ud83d cat"])
def test_a_prompt_that_utf_8_cannot_write_is_refused(checkpoint: Path, prompt: str) -> None:
    # Python gives a byte of a command line that is no UTF-8 as a lone surrogate.
    with pytest.raises(InputError, match=r"^prompt:.*UTF-8"):
        tokenize(load_tokenizer(str(checkpoint)), prompt)


@pytest.mark.parametrize("name", ["runs/add", "./no/such", "owner/name", "/no/such/folder"])
def test_no_hub_is_asked_for_a_path_that_is_mistyped(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def ask(source: str, **_: Any) -> None:
        asked.append(source)
        raise OSError("no such model")

    for kind in ("AutoTokenizer", "AutoConfig"):
        monkeypatch.setattr(f"transformers.{kind}.from_pretrained", ask)
    readers = (load_published, load_tokenizer, lambda name: write_lens_page(name, "1 + 1"))
    for read in readers:
        with pytest.raises(InputError, match="hf:owner/name"):
            read(name)
    assert not asked
    for read in readers:
        with pytest.raises(InputError) as caught:
            read("hf:owner/name")
        assert "no such model" in caught.value.given
    assert asked == ["owner/name"] * 3


def test_a_folder_of_a_models_name_on_the_hub_is_not_read(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(checkpoint, tmp_path / "owner" / "name")
    asked: list[str] = []

    def ask(repository: str, **_: Any) -> str:
        asked.append(repository)
        raise OSError("no such model")

    monkeypatch.setattr("huggingface_hub.snapshot_download", ask)
    for read in (load_published, load_tokenizer, lambda name: write_lens_page(name, "1 + 1")):
        with pytest.raises(InputError) as caught:
            read("hf:owner/name")
        assert "no such model" in caught.value.given
    assert asked == ["owner/name"] * 3
    assert load_published("owner/name").config.d_vocab  # written as a path


def test_pickled_weights_of_a_published_model_are_not_loaded(
    checkpoint: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(checkpoint, tmp_path / "pickled"))
    for path in folder.glob("*.safetensors"):
        torch.save(load_file(path), folder / "pytorch_model.bin")
        path.unlink()
    with pytest.raises(InputError):
        load_published(str(folder))
