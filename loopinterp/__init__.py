"""Mechanistic interpretability of looped transformers, with every loop's activations open.

A looped transformer applies one block of layers again and again. Open a model, run it, and look
at any activation by its loop and layer:

>>> import loopinterp
>>> model = loopinterp.load_pretrained("addition")         # or loopinterp.load("runs/mine")
>>> batch = model.task.encode("13 + 9")                    # or .sample(8, batch_size=64)
>>> logits, cache = model.run_with_cache(batch.inputs)
>>> cache["z", 3, 0].shape                                 # loop 3, layer 0: batch pos head d_head
torch.Size([1, 6, 4, 16])
>>> cache.stack("resid_post").shape                        # loop batch pos d_model
torch.Size([6, 1, 6, 64])

Study it; a result has named axes (``result.data``), sentences, figures, and a file:

>>> from loopinterp.dynamics import convergence_study
>>> result = convergence_study(model, model.task, n=8, batch_size=16)
>>> len(result.figures()) > 0
True

``result.findings()`` says what was found, ``result.save("results")`` writes it.

- Models: ``list_pretrained``, ``load_pretrained``, ``load``, ``LoopedTransformer``, ``train``.
- All studies of a model at once: ``analyze_model(model, task, folder)``; ``studies()`` lists them.
- By question: ``loopinterp.dynamics`` (does it converge?), ``lenses`` (what does each state
  say?), ``probing``, ``interventions`` (which activation carries the answer?), ``edges``.
- Programs: ``get_program``, ``compile_program``, ``compare_programs``, ``loopinterp.decompiler``.
- Pages: ``loopinterp.pages.explore(model, task).save("page.html")``.
- Published models: ``loopinterp.adapters``. Tasks: ``get_task``, ``loopinterp.tasks``.
"""

import importlib
import pkgutil

import lazy_loader

__version__ = "0.5.0"

_named, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)


def __getattr__(name: str) -> object:
    try:
        return _named(name)
    except AttributeError as error:
        if name.startswith("_"):
            raise
        # A name of a subpackage may be asked of the package itself.
        for module in pkgutil.iter_modules(__path__, f"{__name__}."):
            room = importlib.import_module(module.name) if module.ispkg else None
            if name in getattr(room, "__all__", ()):
                text = f"module {__name__!r} has no {name!r}; it is {module.name}.{name}"
                raise AttributeError(text, name=name) from error
        raise
