"""What a user of the installed package does first; run outside the tree by ``make wheel``."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torch

import loopinterp
from loopinterp.dynamics import convergence_study
from loopinterp.pages import write_results

TREE = Path(__file__).resolve().parents[1]


def main() -> None:
    assert TREE / "loopinterp" not in Path(loopinterp.__file__).parents, "the wheel is not used"
    command = [str(Path(sys.executable).with_name("loopinterp"))]

    def run(*arguments: str) -> None:
        subprocess.run([*command, *arguments], check=True, stdout=subprocess.DEVNULL)

    # quickstart
    run_ = loopinterp.zoo.pretrained_run("addition-finite", "copied")
    model, task = run_.model(), run_.task
    batch = task.sample(12, batch_size=64, generator=torch.Generator().manual_seed(0))
    logits, cache = model.run_with_cache(batch.inputs)
    assert cache.stack("attn.hook_pattern").shape[:2] == (12, 64)  # loops, examples
    asked = batch.targets >= 0
    assert bool((logits.argmax(-1) == batch.targets)[asked].all())
    result = convergence_study(model, batch)
    assert result.findings() and result.figures()
    page = write_results({"convergence": result}, "convergence.html", title="Convergence")
    assert page.stat().st_size > 100_000
    # the command line: zoo, studies, report, lens page
    run("zoo")
    run("studies")
    run("analyze", "copied", "--study", "explorer", "--study", "decompilation", "--no-progress")
    run("report", "copied")
    run("lens", "copied", "--prompt", "13 + 9", "--no-progress")
    for name in ("report.html", "lens.html"):
        assert (Path("copied") / name).stat().st_size > 50_000
    print("The installed package works outside the tree.")


if __name__ == "__main__":
    main()
