"""lm-eval evaluates a model of the zoo: its scores are sums over our logits, for each depth."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.peers.asking import ask

pytestmark = [pytest.mark.peers, pytest.mark.slow]

LETTERS = "01234abcdefgh"
DOCS = [
    {"text": context, "choices": ["0", "12", "34", "421"], "label": k % 4}
    for k, context in enumerate(("f0302", "h3020", "a012301", "c4", "b0 "[:2] * 5, "g123123"))
]
DEPTHS = (1, 4)


class Letters:
    """A token of the zoo's Ouro for each letter."""

    bos_token_id = eos_token_id = 5

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [LETTERS.index(letter) for letter in text]

    def decode(self, tokens: list[int]) -> str:
        return "".join(LETTERS[token] for token in tokens)


def answer(folder: Path) -> list[dict[str, Any]]:
    import lm_eval  # pyright: ignore[reportMissingImports]
    from datasets import Dataset  # pyright: ignore[reportMissingImports]
    from lm_eval.api.task import ConfigurableTask  # pyright: ignore[reportMissingImports]

    import loopinterp
    from loopinterp.training import lm_eval_model

    shared = {
        "custom_dataset": lambda **_: {"test": Dataset.from_list(DOCS)},
        "test_split": "test",
        "doc_to_text": "{{text}}",
        "target_delimiter": "",
    }
    choice = shared | {
        "task": "choice",
        "output_type": "multiple_choice",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "label",
    }
    written = shared | {
        "task": "written",
        "output_type": "generate_until",
        "doc_to_target": "{{choices[1]}}",
        "generation_kwargs": {"until": ["zz"], "max_gen_toks": 6},
        "metric_list": [{"metric": "exact_match"}],
    }
    told = []
    for n_loops in DEPTHS:
        model = lm_eval_model(loopinterp.load_pretrained("ouro-small"), Letters(), n_loops=n_loops)
        tasks = [ConfigurableTask(config=dict(config)) for config in (choice, written)]
        result = lm_eval.simple_evaluate(
            model=model, tasks=tasks, log_samples=True, bootstrap_iters=0
        )
        told.append(
            {
                "accuracy": float(result["results"]["choice"]["acc,none"]),
                "scores": [
                    [
                        float(score[0][0] if isinstance(score[0], tuple) else score[0])
                        for score in x["resps"]
                    ]
                    for x in result["samples"]["choice"]
                ],
                "texts": [x["resps"][0][0] for x in result["samples"]["written"]],
            }
        )
    return told


@torch.no_grad()
def test_scores_and_texts_of_a_model_of_the_zoo(tmp_path: Path) -> None:
    import loopinterp

    model, encode = loopinterp.load_pretrained("ouro-small"), Letters().encode
    told = ask("current", __name__, tmp_path)
    assert told[0]["scores"] != told[1]["scores"]
    for n_loops, scored in zip(DEPTHS, told, strict=True):
        right = 0
        for doc, scores, text in zip(DOCS, scored["scores"], scored["texts"], strict=True):
            expected = []
            for choice in doc["choices"]:
                tokens = torch.tensor([encode(doc["text"] + choice)])
                log_p = model(tokens, n_loops=n_loops)[0].log_softmax(-1)
                ends = range(tokens.shape[1] - len(choice), tokens.shape[1])
                expected.append(sum(float(log_p[k - 1, tokens[0, k]]) for k in ends))
            assert scores == pytest.approx(expected, abs=1e-4)
            right += expected.index(max(expected)) == doc["label"]
            tokens = encode(doc["text"])
            for _ in range(6):  # greedy, the whole again for each token
                tokens.append(int(model(torch.tensor([tokens]), n_loops=n_loops)[0, -1].argmax()))
            assert text == Letters().decode(tokens[-6:])
        assert scored["accuracy"] == pytest.approx(right / len(DOCS))
