"""The page of one prompt, for a run, a zoo model or a published language model."""

from __future__ import annotations

import os
from contextlib import contextmanager
from itertools import chain, count
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from loopinterp import adapters, lenses, pages, tasks, zoo
from loopinterp.app.session import open_run
from loopinterp.core.boundary import Loops, checked, resolve_device
from loopinterp.core.errors import InputError, need
from loopinterp.core.settings import Seed
from loopinterp.core.storage import read_json_object
from loopinterp.core.text import showing
from loopinterp.lenses.lens_fits import FITTED, LensName
from loopinterp.models.checkpoints import HUB
from loopinterp.models.protocol import refuse

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Literal

    from loopinterp.lenses import FittedLens
    from loopinterp.pages import Exploration


@checked
def write_lens_page(
    model: str | Path,
    prompt: str,
    *,
    lens: str | Path | FittedLens = "coda",
    out: str | Path | None = None,
    n_loops: Loops | None = None,
    device: str = "auto",
    trust_remote_code: bool = False,
    progress: bool = True,
    seed: Seed = 0,
) -> tuple[Path, Exploration]:
    """Write what a lens reads of one prompt at each loop, as one HTML file that works offline.

    Returns the path and the exploration.

    Args:
        model: Folder of a run; name of a zoo model; folder of a published model
            (``save_pretrained``); or ``hf:owner/name``, which is downloaded.
        prompt: In the task's words (:func:`~loopinterp.tasks.typed_example`); any text for a
            published model.
        lens: ``coda``, the model's own readout; ``logit``; ``tuned`` or ``jacobian``, fitted to
            samples of the task; or the file of a fitted lens.
        out: By default ``lens.html`` in the run's folder or the current one; if it exists,
            ``lens-2.html`` and so on.
        n_loops: By default the model's own, or those of the fitted lens.
        trust_remote_code: Run the code beside a published model's weights.
        seed: Seed of the samples that a lens is fitted to.

    Raises:
        InputError: If there is no such model or lens, they do not fit, the prompt is not in the
            task's words, or ``out`` is no earlier page.
    """
    kind = _kind_of(model)
    chosen = _read_lens(lens)
    need(
        kind != "published" or chosen not in FITTED,
        "lens",
        "logit, coda, or the file of a fitted lens: a published model has no task to draw samples "
        "from",
        repr(chosen),
        "Fit one to texts of yours, loopinterp.lenses.fit_tuned_lens(model, tokens).save(FILE), "
        "and pass --lens FILE.",
    )
    if kind != "published":
        refuse(
            {"trust_remote_code": trust_remote_code or None},
            "no such option for a run or a zoo model, which have no code of their own",
            "Leave it out.",
        )
    folder = Path(model) if kind == "run" else Path()
    page = pages.need_page(_free_page(folder) if out is None else out)
    options: dict[str, Any] = {"lens": chosen, "n_loops": n_loops, "seed": seed}
    with showing(progress):
        if kind == "published":
            hub = str(model).startswith(HUB)
            name = str(model) if hub else Path(model).resolve().name
            with _bars_of_transformers(progress):
                studied, tokens, words = _published(str(model), prompt, device, trust_remote_code)
            result = pages.explore(studied, tokens, words=words, symbols=words, **options)
        else:
            run = zoo.pretrained_run(str(model)).folder if kind == "zoo" else model
            session = open_run(run, seed=seed, device=device)
            name, task = session.name, session.task
            example, known = tasks.typed_example(task, prompt), session.programs()
            options |= {"programs": known, "asks": task.describe()}
            result = pages.explore(session.model, example, **options)
    title = f"{name}: {prompt.strip()}"
    return pages.write_results({"explorer": result}, page, title=title), result


def _free_page(folder: Path) -> Path:
    """The first of lens.html, lens-2.html … that is not there."""
    names = chain(["lens.html"], (f"lens-{k}.html" for k in count(2)))
    return next(folder / name for name in names if not os.path.lexists(folder / name))


def _published(name: str, prompt: str, device: str, trust_remote_code: bool) -> tuple[Any, ...]:
    where = resolve_device(device)  # refused before anything is fetched
    tokenizer = adapters.load_tokenizer(name, trust_remote_code=trust_remote_code)
    model = adapters.load_published(name, trust_remote_code=trust_remote_code, device=where)
    tokens = adapters.tokenize(tokenizer, prompt, n_ctx=model.config.n_ctx)
    n_words = max(model.config.d_vocab, model.config.d_vocab_out)
    return model, tokens, adapters.TokenWords(tokenizer, n_words)


@contextmanager
def _bars_of_transformers(shown: bool) -> Iterator[None]:
    """Show the bars of transformers inside the block only if ``shown``."""
    from transformers.utils import logging

    before = logging.is_progress_bar_enabled()
    if not shown:
        logging.disable_progress_bar()
    try:
        yield
    finally:
        if before:
            logging.enable_progress_bar()


def _kind_of(model: str | Path) -> Literal["run", "zoo", "published"]:
    text, path = str(model), Path(model)
    if text.startswith(HUB):  # also where there is a folder of that name
        return "published"
    if os.path.isdir(path):
        config = path / "config.json"
        # Of a published model it says what it is of; of a run, its task.
        published = config.is_file() and "model_type" in read_json_object(config)
        return "published" if published else "run"
    if text in zoo.list_pretrained().index:
        return "zoo"
    raise InputError(
        "model",
        expected="the folder of a run or of a published model, hf:owner/name on the Hugging Face "
        f"hub, or a model of the zoo: {', '.join(zoo.list_pretrained().index)}",
        given=repr(text),
        fix="Check the path or the name.",
    )


def _read_lens(lens: str | Path | FittedLens) -> Any:
    if isinstance(lens, lenses.FittedLens) or lens in get_args(LensName):
        return lens
    expected = f"{', '.join(get_args(LensName))}, or the file of a fitted lens"
    fix = "Check the name, or write such a file with FittedLens.save."
    need(os.path.isfile(lens), "lens", expected, repr(str(lens)), fix)
    return lenses.FittedLens.load(lens)
