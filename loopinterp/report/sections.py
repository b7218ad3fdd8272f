"""The sections of the report: what each asks, and what a newcomer needs to know to read it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace


@dataclass(frozen=True, kw_only=True)
class Section:
    """One section.

    Attributes:
        key: As :attr:`loopinterp.results.Figure.section` has it; also the anchor.
        title: Heading.
        question: What the section answers.
        intro: The words one needs to read its figures.
        missing: What is said of a run that it applies to, if no saved study belongs to it.
        short: As the table of contents has it; the title by default.
        study: The study that it is about; the one named as the section by default.
        tasks: Tasks that it applies to; all if empty.
        of_programs: Whether it applies only to tasks that a stock program solves.
        of_loops: More words, of models that loop T(n) times.
        once: What takes the place of others of these in a model that makes one loop.
    """

    key: str
    title: str
    question: str
    intro: str = ""
    missing: str = ""
    short: str = ""
    study: str = ""
    tasks: tuple[str, ...] = ()
    of_programs: bool = False
    of_loops: str = ""
    once: Mapping[str, str] = field(default_factory=dict)

    def at(self, depth: int | None) -> Section:
        """The section as it is said of a model of a depth of its own; None: of one that has none.

        Example:
            >>> SECTIONS[0].at(None).title, SECTIONS[0].at(1).title
            ('The task, and a few inputs loop by loop', 'The task, and a few inputs')
        """
        if depth is None:
            return replace(self, intro=f"{self.intro} {self.of_loops}".strip(), of_loops="")
        return replace(self, **self.once) if depth == 1 else self

    def applies(self, task: str) -> bool:
        """Whether there is anything to be said of a model of that task."""
        return (not self.tasks or task in self.tasks) and (
            not self.of_programs or has_programs(task)
        )


def has_programs(task: str) -> bool:
    """Whether a stock program solves the task."""
    from loopinterp.rasp import get_program, list_programs

    return any(get_program(name).task == task for name in list_programs())


EXPLORER = "explorer"
"""The key of the section that stands before the summary: what is asked, on a few inputs."""

SECTIONS = (
    Section(
        key=EXPLORER,
        title="The task, and a few inputs loop by loop",
        short="Explorer",
        question="What is asked, and what does the model make of it?",
        missing="no examples, so the task is not shown",
        once={"title": "The task, and a few inputs"},
    ),
    Section(
        key="generalisation",
        title="Length generalisation",
        question="Does it get inputs right that are longer than any it was trained on?",
        intro=(
            "An answer counts only if every symbol of it is right (exact match). Accuracy bit by "
            "bit hides failure: half of all bits are right by chance."
        ),
        of_loops=(
            "A longer input is given more loops of the same block, as many as the task asks for "
            "at that length."
        ),
        missing="no length study, so nothing is known about longer inputs",
    ),
    Section(
        key="convergence",
        title="Convergence",
        question="Does the state settle as loops go on, and is the answer right once it has?",
        intro=(
            "Each loop applies the same block to the state once more. The relative residual is how "
            "far the last loop moved the state, compared with the state's size. A state can settle "
            "on a wrong answer, or leave a right one, so accuracy stands beside every measure."
        ),
        missing="no convergence study, so it is not known whether its loops settle",
    ),
    Section(
        key="limits",
        title="Limits",
        question="Is there one limit for each input, from every start, and is it stable?",
        intro=(
            "A limit is a state at which the loop rests (a fixed point), or a few that it goes "
            "round (a cycle). One that is reached from every start does not depend on how the run "
            "began; one that is another for every input knows the input. It is stable where a "
            "small disturbance dies out: where the spectral radius, the largest modulus of an "
            "eigenvalue of the loop's Jacobian, is below 1."
        ),
        missing="no study of its limits, so it is not known where other starts lead",
        study="reachability",
    ),
    Section(
        key="wavefront",
        title="The carry wavefront",
        short="Carry wavefront",
        question="How far has the carry travelled after each loop?",
        intro=(
            "Where both bits are 1, a position generates a carry; where exactly one is 1, it "
            "passes on the carry that comes in. A chain of k such positions makes the carry travel "
            "k places. A probe reads the carry from the state by a linear rule: at chance, the "
            "carry is not there yet; near 1, it has arrived. Where attention has a hard window, a "
            "carry cannot be read before it can arrive, whatever was learned: what counts is how "
            "soon it is read from then on."
        ),
        missing="no carry study, so it is not known how fast the carry travels",
        tasks=("addition",),
    ),
    Section(
        key="program",
        title="Program against model",
        short="Program and model",
        question="Which program does the model run?",
        intro=(
            "Rival programs compute the same answers by different steps. To tell them apart, a "
            "piece of the model's state is exchanged for that of another input's run, and what the "
            "model then answers is compared with what each program says if its variables are "
            "exchanged in the same way. The share of agreement is the interchange intervention "
            "accuracy (IIA)."
        ),
        missing="no comparison with programs, so there is no verdict",
        study="programs",
        of_programs=True,
    ),
    Section(
        key="attention",
        title="Attention by loop",
        question="Where does each head look, and does that change from loop to loop?",
        intro=(
            "Weights are the same at every loop; what a head looks at changes only because the "
            "state has changed."
        ),
        missing="no attention study",
        once={"title": "Attention", "question": "Where does each head look?", "intro": ""},
    ),
    Section(
        key="ground-truth",
        title="The tools on known circuits",
        short="Known circuits",
        question="Would these tools find the circuit, if we knew what it was?",
        intro=(
            "A program can be compiled into the weights of a looped transformer: then it is known "
            "where every variable stands, which head computes which selector, and when each value "
            "settles. Hidden behind a rotation, distractors and permutations, such a model is an "
            "honest test of every tool used above."
        ),
        missing="no scores of the tools on models whose circuit is known",
        of_programs=True,
    ),
)
"""All sections with studies, in reading order; "How it was made" follows them."""

OTHER = Section(
    key="other",
    title="Other studies",
    question="What else was measured?",
)
"""What belongs to no section of ours, a study of someone else's, is shown all the same."""
