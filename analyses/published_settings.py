"""The published settings of systems B and C: what ``gpu`` trains, and ``published_loss`` follows.

B is arXiv 2409.15647. Its code (a public copy: truongbuu/looped-tf) runs GPT-2's model whole at
each loop, so that its last LayerNorm is inside the loop; starts from zeros; reads each example's
answer after its own T(n) loops; and takes PyTorch's AdamW as it is. Where it and ours differ:

- it draws GPT-2's weights from N(0, 0.02), with a smaller output of each sublayer; ours are
  PyTorch's own, as are those of its embedding and readout;
- its cosine, and its average of weights, begin two lengths after the last length is reached;
- it pads to the longest length of the curriculum, ours to the longest example of the batch;
- it has no BOS token; a one-hot vector and a linear map with a bias are its embedding.

C is a public reproduction of arXiv 2405.17399: positions on queries and keys, the embedding added
to the normed input of each sublayer, half of the loss after a random number of loops. There is no
gradient clipping, and the learning rate is constant, so it can be looked at whenever it is stopped.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from loopinterp.training import TrainingConfig

PAPER: dict[str, dict[str, Any]] = {
    "parity": {"layers": 1, "heads": 64, "grows_every": 500, "max_n": 20, "test_n": 50},
    "copy": {"layers": 2, "heads": 8, "grows_every": 1000, "max_n": 19, "test_n": 30},
    "token_addition": {"layers": 3, "heads": 8, "grows_every": 1600, "max_n": 19, "test_n": 30},
    "multiplication": {"layers": 4, "heads": 8, "grows_every": 500, "max_n": 11, "test_n": 15},
    "binary_sum": {"layers": 2, "heads": 16, "grows_every": 500, "max_n": 19, "test_n": 24},
    "unique_set": {"layers": 3, "heads": 8, "grows_every": 1000, "max_n": 19, "test_n": 30},
}
"""arXiv 2409.15647: block, curriculum, and the length up to which it reports."""

AVERAGED = ("parity", "binary_sum")
"""Tasks whose weights the paper averages."""

ABACUS = {"1x16": (1, 16), "8x2": (8, 2)}
"""Blocks of effective depth 16: layers, and loops in training."""

DEPTHS = (1, 2, 8, 16, 32)
"""Layers run one after another at which the grid by operand lengths is asked for."""


_OURO = {
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "vocab_size": 49152,
    "max_position_embeddings": 2048,
}
SHAPES: dict[str, tuple[str, dict[str, int]]] = {
    "ouro-1.4B": ("ouro", {**_OURO, "num_hidden_layers": 24}),
    "ouro-2.6B": ("ouro", {**_OURO, "num_hidden_layers": 48}),
    "huginn-3.5B": (
        "huginn",
        {
            "n_embd": 5280,
            "n_heads": 55,
            "intermediate_size": 17920,
            "vocab_size": 65536,
            "block_size": 2048,
            "mean_recurrence": 32,
        },
    ),
}
"""Architecture and sizes, as the published configurations have them."""


def paper_config(task: str, *, device: str = "cuda", small: bool = False) -> TrainingConfig:
    """The published setting of a task of B; ``small`` is one of seconds, to try the rest on."""
    from loopinterp.tasks import get_task
    from loopinterp.training import TrainingConfig

    known, asked = PAPER[task], get_task(task)
    model = {
        "d_model": 16 if small else 256,
        "n_heads": 2 if small else known["heads"],
        "n_layers": known["layers"],
        "d_vocab": asked.d_vocab,
        "d_vocab_out": asked.d_vocab_out,
        "act_fn": "gelu_new",
        "injection": "input",
        "initial_state": "zeros",
        "loop_norm": True,
        "final_norm": False,
    }
    curriculum = {
        "kind": "interval",
        "interval": 2 if small else known["grows_every"],
        "max_n": 3 if small else known["max_n"],
    }
    adam = {"lr": 1e-4, "betas": [0.9, 0.999], "warmup_steps": 0, "schedule": "cosine"}
    own = {
        "task": task,
        "distribution": "uniform",
        "model": model,
        "curriculum": curriculum,
        "optimiser": adam,
        "batch_size": 4 if small else 64,
        "ema": 0.9999 if task in AVERAGED else 0.0,
        "checkpoint_every": 4 if small else 500,
    }
    return TrainingConfig.from_dict(own | _run(device, small))


def abacus_config(block: str, *, device: str = "cuda", small: bool = False) -> TrainingConfig:
    """The published setting of a block of C: sums of numbers of 1 to 20 digits each."""
    from loopinterp.tasks import get_task
    from loopinterp.training import TrainingConfig

    asked, (n_layers, n_loops) = get_task("abacus_addition"), ABACUS[block]
    model = {
        "d_model": 16 if small else 1024,
        "n_heads": 2 if small else 16,
        "d_mlp": 32 if small else 2048,
        "n_layers": n_layers,
        "n_loops": n_loops,
        "d_vocab": asked.d_vocab,
        "d_vocab_out": asked.d_vocab_out,
        "positions": "abacus",
        "abacus_target": "qk",
        "abacus_max_offset": 99,
        "digit_tokens": list(range(10)),
        "n_ctx": 512,
        "norm_eps": 1e-12,
        "injection": "sublayer",
        "final_norm": False,
    }
    longest = 3 if small else 20
    adam = {"lr": 1e-4, "betas": [0.9, 0.999], "warmup_steps": 0, "schedule": "constant"}
    own = {
        "task": "abacus_addition",
        "distribution": "independent",
        "model": model,
        "objective": {"kind": "progressive", "n_loops": n_loops, "alpha": 0.5},
        "curriculum": {"kind": "none", "min_n": longest, "max_n": longest},
        "optimiser": adam | {"clip": None},
        "batch_size": 4 if small else 95,
        "ema": 0.0,
        "checkpoint_every": 4 if small else 250,
    }
    return TrainingConfig.from_dict(own | _run(device, small))


def _run(device: str, small: bool) -> dict[str, Any]:
    """What is ours: how long, how often something is written, and how it is computed."""
    return {
        "steps": 8 if small else 100_000,
        "log_every": 4 if small else 100,
        "precision": "fp32" if device == "cpu" else "bf16",
        "device": device,
    }
