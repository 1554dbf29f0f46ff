"""With each algorithm's configuration, verl's code gives the loss computed by hand, and observations have no loss.

Two samples of one prompt, three response tokens each; the second token of the first and the third of the second are
observations. The old policy gave every token a probability of 1/2.
"""

from __future__ import annotations

import math
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from extras import needs

needs("verl")
torch = pytest.importorskip("torch")

import yaml  # noqa: E402

from afm.configuration import read_extended  # noqa: E402
from verl_ext.algorithms import choice_findings  # noqa: E402
from verl_ext.compose import compose, overrides_of  # noqa: E402
from verl_ext.settings import load_settings  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
ALGORITHMS = sorted((ROOT / "configs/rl/algorithms").glob("*.yaml"))

MASK = torch.tensor([[1, 0, 1], [1, 1, 0]])
OLD = torch.full((2, 3), math.log(0.5))
RATIO = torch.tensor([[1.5, 9.0, 0.5], [1.1, 0.9, 9.0]])
UP_DOWN = torch.tensor([[1.0], [-1.0]]).expand(2, 3)


@cache
def composed(*fragments: str, laid_over: str = "{}") -> Any:
    """Compose verl's configuration of the tiny recipe with algorithm files and some YAML merged into it."""
    files = [str(ROOT / "configs/tiny/rl/math.yaml")]
    files += [str(ROOT / f"configs/rl/algorithms/{name}.yaml") for name in fragments]
    with TemporaryDirectory() as folder:
        path = Path(folder) / "rl.yaml"
        path.write_text(yaml.safe_dump({"extends": files} | yaml.safe_load(laid_over)))
        return compose(overrides_of(load_settings(path)))


def policy_loss(config: Any, *, advantages: Any = UP_DOWN, ratio: Any = RATIO, weights: Any = None) -> Any:
    """Return the loss and the log-probabilities that have a gradient."""
    from verl.trainer.ppo.core_algos import get_policy_loss_fn
    from verl.utils.config import omega_conf_to_dataclass

    actor = omega_conf_to_dataclass(config.actor_rollout_ref.actor)
    actor.global_batch_info["loss_scale_factor"] = actor.loss_scale_factor
    log_prob = (OLD + ratio.log()).requires_grad_()
    loss, _ = get_policy_loss_fn(actor.policy_loss.get("loss_mode", "vanilla"))(
        old_log_prob=OLD,
        log_prob=log_prob,
        advantages=advantages,
        response_mask=MASK,
        loss_agg_mode=actor.loss_agg_mode,
        config=actor,
        rollout_is_weights=weights,
    )
    return loss, log_prob


def advantages(config: Any, rewards: list[float]) -> Any:
    from verl.trainer.ppo.core_algos import get_adv_estimator_fn

    tokens = torch.zeros(len(rewards), 3)
    tokens[:, 2] = torch.tensor(rewards)
    name, by_spread = config.algorithm.adv_estimator, config.algorithm.norm_adv_by_std_in_grpo
    found, _ = get_adv_estimator_fn(name)(
        token_level_rewards=tokens,
        response_mask=torch.ones(len(rewards), 3),
        index=np.array(["q"] * len(rewards), dtype=object),
        config=config.algorithm,
        **({} if name == "rloo" else {"norm_adv_by_std_in_grpo": by_spread}),
    )
    return found[:, 0]


@pytest.mark.slow
@pytest.mark.parametrize("path", ALGORITHMS, ids=lambda path: path.stem)
def test_every_file_says_its_formula_and_its_source_and_composes(path: Path) -> None:
    head = path.read_text("utf-8").split("\nverl:")[0]
    assert "arXiv" in head or "et al." in head
    assert "=" in head
    assert list(read_extended(path, "an algorithm")) == ["verl"]
    composed(path.stem)


@pytest.mark.slow
def test_dapo() -> None:
    """min(1.5, 1.28) = 1.28 and min(.5, .8) = .5 upwards; max(1.1, 1.1) and max(.9, .9) downwards; mean of four tokens."""
    loss, log_prob = policy_loss(composed())
    assert loss.item() == pytest.approx((-1.28 - 0.5 + 1.1 + 0.9) / 4)
    loss.backward()
    # The clipped token and the observations have no gradient; an unclipped one has -A r / 4.
    assert log_prob.grad.tolist() == [pytest.approx([0, 0, -0.5 / 4]), pytest.approx([1.1 / 4, 0.9 / 4, 0])]


def test_dual_clip_bounds_the_loss_of_a_bad_sample() -> None:
    """A = -1 and r = 5 would cost 5; c = 3 bounds it."""
    loss, _ = policy_loss(composed(), ratio=torch.tensor([[1.0, 9, 1], [5, 1, 9]]))
    assert loss.item() == pytest.approx((-1 - 1 + 3 + 1) / 4)


def test_gspo() -> None:
    """s = sqrt(1.5 x .5) = .866 upwards is kept; s = sqrt(1.1 x .9) = .99499 downwards is clipped to .9997."""
    loss, _ = policy_loss(composed("gspo"))
    assert loss.item() == pytest.approx((-math.sqrt(0.75) + 0.9997) / 2, abs=1e-6)


def test_cispo() -> None:
    """-r A ln(r / 2) for each token; and each has a gradient, however large its ratio: -A min(r, 5)."""
    loss, log_prob = policy_loss(composed("cispo"), ratio=torch.tensor([[8.0, 9, 0.5], [1.1, 0.9, 9]]))
    terms = [-5 * math.log(4), -0.5 * math.log(0.25), 1.1 * math.log(0.55), 0.9 * math.log(0.45)]
    assert loss.item() == pytest.approx(sum(terms) / 4, abs=1e-6)
    loss.backward()
    assert log_prob.grad.tolist() == [
        pytest.approx([-5 / 4, 0, -0.5 / 4]),
        pytest.approx([1.1 / 4, 0.9 / 4, 0]),
    ]


def test_dr_grpo() -> None:
    """Rewards 1, 0, 0, 0: mean 1/4, advantages 3/4 and -1/4. Token sums over the longest response, mean over sequences."""
    config = composed("dr_grpo", laid_over="limits: {max_response_tokens: 10}")
    assert advantages(config, [1, 0, 0, 0]).tolist() == pytest.approx([0.75, -0.25, -0.25, -0.25])
    loss, _ = policy_loss(config)
    assert loss.item() == pytest.approx(((-1.28 - 0.5) + (1.1 + 0.9)) / 2 / 10)


def test_grpo_divides_by_the_spread() -> None:
    """Rewards 1, 0: mean 1/2, standard deviation (of a sample) 1/sqrt(2)."""
    found = advantages(composed(), [1, 0]).tolist()
    assert found == pytest.approx([math.sqrt(0.5), -math.sqrt(0.5)], abs=1e-4)


def test_rloo() -> None:
    """Rewards 1, 0, .5: 1 - .25, 0 - .75, .5 - .5."""
    assert advantages(composed("rloo"), [1, 0, 0.5]).tolist() == pytest.approx([0.75, -0.75, 0.0])


@pytest.mark.parametrize("fragments", [(), ("tis",)])
def test_tis_is_on_and_weights_tokens_by_the_trainers_probability(fragments: tuple[str, ...]) -> None:
    """.5 / .4 = 1.25; .5 / .1 = 5 is cut off at 2. Observations weigh nothing."""
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_rejection_mask

    correction = composed(*fragments).algorithm.rollout_correction
    weights, mask, _ = compute_rollout_correction_and_rejection_mask(
        old_log_prob=OLD,
        rollout_log_prob=torch.tensor([[0.4, 0.5, 0.1], [0.5, 1.0, 0.001]]).log(),
        response_mask=MASK,
        rollout_is=correction.rollout_is,
        rollout_is_threshold=correction.rollout_is_threshold,
        rollout_rs=correction.rollout_rs,
    )
    found = weights.batch["rollout_is_weights"] * MASK
    assert found.tolist() == [pytest.approx([1.25, 0, 2.0]), pytest.approx([1.0, 0.5, 0])]
    assert mask.tolist() == MASK.tolist()
    loss, _ = policy_loss(composed(), ratio=torch.ones(2, 3), weights=weights.batch["rollout_is_weights"])
    assert loss.item() == pytest.approx((-1.25 - 2 + 1 + 0.5) / 4)


def whole_loss(config: Any, *, entropy: Any = None, reference: Any = None) -> Any:
    """Return verl's complete actor loss on a jagged batch, as its trainer passes it."""
    from tensordict import TensorDict
    from verl.utils.config import omega_conf_to_dataclass
    from verl.utils.tensordict_utils import assign_non_tensor
    from verl.workers.utils.losses import ppo_loss

    def jagged(**tensors: Any) -> dict[str, Any]:
        return {
            key: torch.nested.as_nested_tensor(list(tensor), layout=torch.jagged)
            for key, tensor in tensors.items()
            if tensor is not None
        }

    # verl's model output has a value for every token but the first; the prompt here has one token.
    end = torch.zeros(2, 1)
    entropy = None if entropy is None else torch.cat([entropy, end], dim=1)
    output = jagged(log_probs=torch.cat([OLD + RATIO.log(), end], dim=1), entropy=entropy)
    fields = jagged(
        prompts=torch.ones(2, 1, dtype=torch.long),
        responses=torch.ones(2, 3, dtype=torch.long),
        response_mask=MASK,
        old_log_probs=OLD,
        advantages=UP_DOWN,
        ref_log_prob=reference,
    )
    data = TensorDict(fields, batch_size=2)
    assign_non_tensor(data, dp_size=1, batch_num_tokens=4, global_batch_size=2, max_response_len=3)
    actor = omega_conf_to_dataclass(config.actor_rollout_ref.actor)
    return ppo_loss(actor, output, data)[0].item()


PLAIN = (-1.28 - 0.5 + 1.1 + 0.9) / 4


def test_entropy() -> None:
    """Entropies 1, 2, 3 and 4 of the agent's tokens, 100 of an observation's: mean 2.5."""
    entropy = torch.tensor([[1.0, 100, 2], [3, 4, 100]])
    config = composed("entropy")
    assert whole_loss(config, entropy=entropy) == pytest.approx(PLAIN - 0.001 * 2.5, abs=1e-6)


def test_kl() -> None:
    """A reference that gives each agent token twice the probability: d = ln 2, k3 = 2 - ln 2 - 1."""
    reference = OLD + RATIO.log() + math.log(2)
    reference[MASK == 0] = -9.0  # of observations: no matter what
    config = composed("kl")
    assert whole_loss(config, reference=reference) == pytest.approx(
        PLAIN + 0.001 * (1 - math.log(2)), abs=1e-6
    )


def gae(values: list[list[float]], rewards: list[list[float]], gamma: float, lam: float) -> Any:
    from verl.trainer.ppo.core_algos import compute_gae_advantage_return

    tensors = (torch.tensor(rewards), torch.tensor(values), MASK.float())
    return compute_gae_advantage_return(*tensors, gamma, lam)


def test_gae_passes_over_observations() -> None:
    """lambda = gamma = 1: the return of a token is the rest of the reward, without the observation's value."""
    for observed in (0.3, 77.0):
        values = [[0.2, observed, 0.6], [0.1, 0.4, observed]]
        _, returns = gae(values, [[0, 0, 1.0], [0, 0.0, 0]], 1.0, 1.0)
        assert (returns * MASK).flatten().tolist() == pytest.approx([1, 0, 1, 0, 0, 0], abs=1e-6)
    # gamma .9, lambda .5: delta_3 = 1 - .6 = .4; delta_1 = .9 x .6 - .2 = .34; A_1 = .34 + .45 x .4 = .52.
    values = [[0.2, 77.0, 0.6], [0.1, 0.4, 77.0]]
    _, returns = gae(values, [[0, 0, 1.0], [0, 0.0, 0]], 0.9, 0.5)
    assert (returns * MASK)[0].tolist() == pytest.approx([0.2 + 0.52, 0, 1.0])


def test_weights_or_probabilities_must_be_compared() -> None:
    """With SGLang or without the weight proof, no other check shows whether the trainer's weights arrive."""
    bypass = "{verl: {algorithm: {rollout_correction: {bypass_mode: true}}}}"
    config = composed(laid_over=bypass).copy()
    assert not [*choice_findings(config)]
    rollout = config.actor_rollout_ref.rollout
    name, rollout.name = rollout.name, "sglang"
    assert ["bypass_mode: with SGLang" in finding.text for finding in choice_findings(config)] == [True]
    rollout.name, rollout.custom = name, {"weight_proof": False}
    assert ["with weight_proof: false" in finding.text for finding in choice_findings(config)] == [True]


def test_the_name_of_a_recipe_is_answered_with_its_estimator() -> None:
    config = composed(laid_over="{verl: {}}").copy()
    for name, message in (
        ("dapo", "estimator is grpo; write `extends: configs/rl/base/dapo.yaml`"),
        ("ppo", "ppo is a recipe, whose estimator is gae"),
        ("grop", "did you mean 'grpo'?"),
    ):
        config.algorithm.adv_estimator = name
        [finding] = choice_findings(config)
        assert message in finding.text
