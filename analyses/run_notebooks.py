"""Run the notebooks and keep them with what they show.

    python -m analyses.run_notebooks                 # all
    python -m analyses.run_notebooks limits carry_probing

Figures are kept as still pictures, which any page shows that shows notebooks at all; run the
notebook to have them move. A digest of the code stands in the metadata, so that the tests see if
outputs are of other code than stands there. What a cell writes to the error stream fails the run:
a reader should see no warnings.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import os
import tempfile
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

from analyses.still_pictures import StillPictures

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = ROOT / "analyses" / "notebooks"
_PLOTLY = "application/vnd.plotly.v1+json"


def main() -> None:
    names = sorted(path.stem for path in NOTEBOOKS.glob("*.ipynb"))
    parser = argparse.ArgumentParser(description="Run the notebooks and keep their outputs.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(names))
    chosen = parser.parse_args().names or names
    if unknown := set(chosen) - set(names):
        parser.error(
            f"no notebook called {', '.join(sorted(unknown))}; there are {', '.join(names)}"
        )
    with StillPictures() as pictures:
        for name in chosen:
            path = NOTEBOOKS / f"{name}.ipynb"
            with tempfile.TemporaryDirectory() as folder:
                notebook = execute(nbformat.read(path, as_version=4), Path(folder))
            for output in outputs(notebook):
                still(output, pictures)
            notebook.metadata["loopinterp"] = {"code": digest(notebook)}
            nbformat.write(notebook, path)
            print(f"{path.relative_to(ROOT)}: {path.stat().st_size / 1e3:.0f} kB", flush=True)


def execute(notebook: nbformat.NotebookNode, folder: Path) -> nbformat.NotebookNode:
    """A notebook after all of its cells have run in a folder; raises if one fails or warns."""
    settings = {
        "PLOTLY_RENDERER": "plotly_mimetype",
        "PYTHONPATH": str(ROOT),
        "LOOPINTERP_PROGRESS": "0",
    }
    before = dict(os.environ)
    os.environ.update(settings)
    try:
        resources = {"metadata": {"path": folder}}
        NotebookClient(notebook, timeout=600, startup_timeout=600, resources=resources).execute()
    finally:
        os.environ.clear()
        os.environ.update(before)
    for output in outputs(notebook):
        if output.output_type == "stream" and output.name == "stderr":
            raise SystemExit(f"a cell writes to the error stream: {output.text}")
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)  # times of day
    return notebook


def outputs(notebook: nbformat.NotebookNode) -> list[Any]:
    """What all cells show."""
    return [output for cell in notebook.cells for output in cell.get("outputs", [])]


def still(output: Any, pictures: StillPictures) -> None:
    """Put a picture in the place of a figure that needs a script."""
    data = output.get("data", {})
    if _PLOTLY in data:
        spec = data[_PLOTLY]
        figure = {"data": spec["data"], "layout": spec["layout"]}
        output["data"] = {"image/png": base64.b64encode(pictures.draw(figure)).decode()}


def digest(notebook: nbformat.NotebookNode) -> str:
    """A digest of all code of a notebook."""
    code = "\n\n".join(cell.source for cell in notebook.cells if cell.cell_type == "code")
    return hashlib.sha256(code.encode()).hexdigest()


if __name__ == "__main__":
    main()
