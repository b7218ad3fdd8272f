"""The picture of a circuit's graph in the guide, a node of it chosen.

    python -m analyses.circuit_picture

writes ``docs/pictures/circuit-graph.png``. Needs Chromium and the extra ``browser``.
"""

from pathlib import Path
from tempfile import TemporaryDirectory

from analyses.pictures import PICTURES, keep
from analyses.still_pictures import StillPictures
from loopinterp.rasp import draw_program, get_program
from loopinterp.report import write_circuit_page

CHOOSE = """() => {
  document.querySelector('header').remove();
  document.querySelector('main').style.padding = '1rem';
  document.querySelector('.folded.wide .node.head').dispatchEvent(new MouseEvent('click'));
}"""

if __name__ == "__main__":
    graph = draw_program(get_program("ripple_held_2"))
    with TemporaryDirectory() as folder, StillPictures() as pictures:
        page = write_circuit_page(graph, Path(folder) / "circuit.html")
        picture = pictures.photograph(page, width=1060, height=850, script=f"({CHOOSE})()")
        keep(picture, PICTURES / "circuit-graph.png")
