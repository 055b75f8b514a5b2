"""Action masks: what infos["action_mask"] forbids is never taken, and has no gradient."""

import json

import gymnasium as gym
import numpy as np
import probes
import pytest
import torch
from conftest import DISCRETE, RNN, SMALL, act, assert_one_line, flags_of, policy

BOTH = pytest.mark.parametrize("script", ["ppo_discrete", "ppo_rnn"], indirect=True)


@BOTH
@pytest.mark.parametrize("sizes", [[2, 3], [3, 3]])
def test_predict_takes_masks_as_environments_give_them(script, sizes):
    """A tuple or list with an array for each dimension, or one array, each of which leaves one choice here. For many
    observations a row for each, or an array of tuples, as a vector of environments gathers them."""
    agent, one_hot = policy(script, sizes), [np.eye(n, dtype=np.int8) for n in sizes]
    raw_obs = np.zeros(sum(sizes), np.float32)
    masks, others = (one_hot[0][1], one_hot[1][2]), (one_hot[0][0], one_hot[1][1])
    for mask in (masks, list(masks), np.hstack(masks), np.hstack(masks).tolist()):
        assert act(agent, raw_obs, action_mask=mask).tolist() == [1, 2]
    pair = np.empty(2, object)
    pair[:] = masks, others
    for rows in (np.stack([np.hstack(masks), np.hstack(others)]), pair):
        assert act(agent, np.stack([raw_obs] * 2), action_mask=rows).tolist() == [[1, 2], [0, 1]]


@BOTH
def test_masked_choices_have_no_gradient(script):
    """Neither through the log-probability nor through the entropy; and nothing is NaN."""
    logits = torch.randn(5, 6, requires_grad=True)
    mask = torch.tensor([1, 0, 0, 1, 0, 1]).bool().expand(5, 6)
    action = torch.tensor([[0, 1, 1]]).expand(5, 3)
    _, log_prob, entropy, _ = policy(script, [2, 2, 2]).get_action_and_value(logits, action, mask)
    (gradient,) = torch.autograd.grad((log_prob + entropy).sum(), logits)
    assert (gradient == 0).all()  # one choice is left in each dimension
    mask = torch.tensor([1, 1, 0, 1, 1, 1]).bool().expand(5, 6)
    _, log_prob, entropy, _ = policy(script, [3, 3]).get_action_and_value(logits, action[:, :2], mask)
    (gradient,) = torch.autograd.grad((log_prob + entropy).sum(), logits)
    assert gradient.isfinite().all() and ((gradient == 0) == ~mask).all()


@DISCRETE
def test_samples_are_never_forbidden(script):
    """20,000 samples under random masks, also of logits that want nothing but what is forbidden."""
    torch.manual_seed(0)
    sizes, agent = [4, 2, 5], policy(script, [4, 2, 5])
    mask = torch.rand(20_000, 11) < 0.5
    mask[:, [0, 4, 6]] |= ~torch.stack([part.any(-1) for part in mask.split(sizes, -1)], -1)
    logits = torch.where(torch.rand(20_000, 1) < 0.5, 50.0 * ~mask, 3 * torch.randn(20_000, 11))
    action, log_prob, _, _ = agent.get_action_and_value(logits, action_mask=mask)
    for part, choice in zip(mask.split(sizes, -1), action.unbind(-1)):
        assert part.gather(-1, choice.unsqueeze(-1)).all()
    assert log_prob.isfinite().all()
    best = agent.predict(logits, action_mask=mask)
    for part, choice in zip(mask.split(sizes, -1), torch.tensor(best).unbind(-1)):
        assert part.gather(-1, choice.unsqueeze(-1)).all()


FORMS = [("ppo_discrete", form) for form in ("flat", "tuple", "list", "lists", "row")]


@pytest.mark.parametrize("script, form", [*FORMS, ("ppo_rnn", "flat")], indirect=["script"])
def test_masks_reach_the_environment(script, small_args, form):
    """Over rollouts and episodes, in training and in evaluation: the environment refuses what it forbids."""
    env_kwargs = json.dumps({"form": form})
    args = small_args(env_id="masks/Masked-v0", env_kwargs=env_kwargs)
    agent, _ = script.train(args)
    for args.eval_deterministic in (True, False):
        script.evaluate(agent, args, 5)


@DISCRETE
def test_masks_that_forbid_everything(script, main, tmp_path):
    flags = flags_of(env_id="masks/Masked-v0", env_kwargs=json.dumps({"form": "none"}), runs_dir=tmp_path, **SMALL)
    assert_one_line(main(script, *flags), 'infos["action_mask"] forbids every choice')


@DISCRETE
@pytest.mark.parametrize("form", ["short", "number"])
def test_masks_of_another_size(script, small_args, form):
    """No silent training on a part of it."""
    with pytest.raises((RuntimeError, ValueError, TypeError), match=r"shape|stack"):
        script.train(small_args(env_id="masks/Masked-v0", env_kwargs=json.dumps({"form": form})))


class Sometimes(probes.Masked):
    """Only its odd copies give a mask, and those only sometimes."""

    def observe(self):
        obs, infos = super().observe()
        if self.np_random_seed % 2 == 0 or self.np_random.random() < 0.3:
            self.masks = [np.ones(3), np.ones(2)]
            return np.ones(5, np.float32), {}
        return obs, infos


gym.register("masks/Sometimes-v0", Sometimes)


@DISCRETE
def test_masks_of_some_environments_only(script, small_args, minibatches):
    """Where there is none, every choice is allowed. The update has the masks that the observations show."""
    script.train(small_args(env_id="masks/Sometimes-v0", norm_obs=False, num_steps=32))
    for (_, _, mb_obs, _, mb_masks, *_), _ in minibatches:
        assert torch.equal(mb_masks, mb_obs.bool())
        assert mb_masks.all(-1).any() and not mb_masks.all(-1).all()


class BoxWithMask(probes.Target):
    """Box actions, for which a mask has no meaning."""

    def __init__(self):
        super().__init__(discrete=False)

    def reset(self, *, seed=None, options=None):
        return super().reset(seed=seed)[0], {"action_mask": np.ones(2, np.int8)}


gym.register("masks/Box-v0", BoxWithMask)


@RNN
def test_mask_of_box_actions_is_ignored(script, small_args):
    agent, run_dir = script.train(small_args(env_id="masks/Box-v0", total_timesteps=64))
    assert len(script.evaluate(agent, script.load_args(run_dir), 1)) == 1
