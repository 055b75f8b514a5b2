"""Would a test notice? One-line mistakes in the five scripts, each held against the tests that concern it.

    python tests/mutants.py                  # all of them, one on each core: about half an hour
    python tests/mutants.py entropy ppo_rnn  # those whose script, line or tests have one of these words

A mutant is a copy of the repository in which one piece of one script is replaced. A test has to fail there. The tool
prints each mutant with the test that failed, and at the end those that no test has noticed; the exit status is then 1.
test_parity.py is never asked: it compares texts, and would notice a mistake in shared text whatever it does.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# script, text, what stands there instead, test files and words of test names (as pytest's -k takes them)
MUTANTS = [
    # ---------------------------------------------------------------------------------------- statistics, network
    ("ppo_continuous", "- self.obs_rms.mean)", "+ self.obs_rms.mean)", "agent"),
    ("ppo_discrete", ".clamp(-10, 10).float()", ".clamp(-2, 2).float()", "agent"),
    ("ppo_continuous", "self.count += count", "self.count += 1", "agent: statistics"),
    ("ppo_rnn", "old_share * new_share * delta", "new_share * delta", "agent: statistics"),
    ("ppo_continuous", "mean = average_over_ranks(x.mean(0))", "mean = x.mean(0)", "agent: ranks"),
    ("ppo_continuous", "action_size, gain=0.01)", "action_size, gain=1.0)", "agent: initialisation"),
    ("ppo_discrete", "orthogonal_(layer.weight, gain)", "orthogonal_(layer.weight)", "agent: initialisation"),
    ("ppo_continuous", "nn.Tanh()]", "nn.ReLU()]", "agent"),
    ("ppo_continuous", "np.stack(all_raw_obs)", "np.stack(all_raw_obs[1:])", "agent"),
    ("ppo_discrete", "return obs, action, log_prob,", "return raw_obs.float(), action, log_prob,", "agent losses"),
    # ------------------------------------------------------------------------------------------- policy, sampling
    ("ppo_continuous", "float(args.log_std_init)", "0.0", "agent"),
    ("ppo_continuous", "mean + log_std.exp() * torch", "mean + 0.8 * log_std.exp() * torch", "agent"),
    ("ppo_continuous", "log_std + 0.5 * math.log(2 * math.pi))", "log_std + math.log(2 * math.pi))", "agent"),
    ("ppo_continuous", "math.log(2 * math.pi * math.e)", "math.log(2 * math.pi)", "agent"),
    ("ppo_continuous", "action.clamp(self.action_low, self.action_high)", "action", "agent"),
    ("ppo_continuous", "[0] if deterministic else", "[0] if not deterministic else", "run agent"),
    ("ppo_continuous", "math.pi / 2 * remaining", "math.pi / 4 * remaining", "losses: anneal_std"),
    ("ppo_continuous", "+ reach.log().to(log_std.dtype)", "", "losses: bound"),
    ("ppo_continuous", "self.log_std.copy_(self.clamp_log_std(self.log_std))", "pass", "losses: log_std"),
    ("ppo_discrete", "exponential_().log()).argmax", "exponential_().log()).argmin", "discrete"),
    ("ppo_discrete", "(x - torch.empty_like", "(2 * x - torch.empty_like", "discrete"),
    ("ppo_discrete", "-(x.exp() * x).sum(-1)", "-x.mean(-1)", "discrete"),
    ("ppo_discrete", "action + self.action_start.long()", "action", "discrete agent"),
    ("ppo_discrete", "masked_fill(~action_mask,", "masked_fill(action_mask,", "discrete"),
    ("ppo_discrete", "torch.finfo(logits.dtype).min", "-3.0", "discrete"),
    ("ppo_discrete", "if has_masks else True", "if False else True", "discrete"),
    ("ppo_discrete", "x / 255.0", "x / 1.0", "discrete"),
    ("ppo_discrete", "shape[0] != min(shape)", "shape[0] == min(shape)", "discrete"),
    ("ppo_rnn", "(x - torch.empty_like", "(2 * x - torch.empty_like", "rnn"),
    ("ppo_rnn", "mean + log_std.exp() * torch", "mean + 0.8 * log_std.exp() * torch", "rnn agent"),
    # ------------------------------------------------------------------------------------------------- advantages
    ("ppo_continuous", "discounted_returns.mul_(gamma)", "discounted_returns.mul_(1.0)", "agent: reward"),
    ("ppo_rnn", "discounted_returns.masked_fill_(end, 0.0)", "pass", "agent: reward"),
    ("ppo_discrete", "(return_rms.var + 1e-8).sqrt()", "(return_rms.var + 1e-8)", "agent: reward"),
    ("ppo_continuous", "next_values.masked_fill(terminations", "next_values.masked_fill(truncations", "advantages"),
    ("ppo_discrete", "~(terminations | truncations)", "~terminations", "advantages"),
    ("ppo_continuous", "(gamma * gae_lambda) *", "gae_lambda *", "advantages"),
    ("ppo_rnn", "range(len(deltas) - 1)", "range(len(deltas) - 2)", "advantages"),
    ("ppo_continuous", "return advantages, advantages + values", "return advantages, advantages + next_values", "advantages"),
    ("ppo_continuous", "next_values[truncations] = agent.get_value(final_obs)", "pass", "advantages"),
    ("ppo_discrete", "agent.get_value(last_obs).unsqueeze(0)", "values[-1:]", "advantages"),
    ("ppo_continuous", "truncated & ~terminated ", "truncated ", "corners advantages"),
    ("ppo_continuous", "if epoch > 0 and args.recompute", "if epoch > 1 and args.recompute", "advantages"),
    ("ppo_continuous", "copy.deepcopy(obs)", "obs", "run: final"),
    ("ppo_continuous", "AutoresetMode.SAME_STEP", "AutoresetMode.NEXT_STEP", "run advantages"),
    # ----------------------------------------------------------------------------------------------------- losses
    ("ppo_continuous", "torch.max(-advantages * ratio", "torch.min(-advantages * ratio", "losses"),
    ("ppo_discrete", "1 - clip_coef, 1 + clip_coef)).mean()", "1 - clip_coef, 1 + 2 * clip_coef)).mean()", "losses"),
    ("ppo_rnn", "near_values = old_values +", "near_values = returns +", "losses"),
    ("ppo_continuous", "torch.max(errors,", "torch.min(errors,", "losses"),
    ("ppo_continuous", "return 0.5 * errors.mean()", "return errors.mean()", "losses"),
    ("ppo_discrete", "mb_advantages.std() + 1e-8", "mb_advantages.var() + 1e-8", "losses"),
    ("ppo_continuous", "else clip_scale * args.vf_clip_coef", "else args.vf_clip_coef", "losses"),
    ("ppo_continuous", "clip_scale * args.clip_coef, None", "args.clip_coef, None", "losses"),
    ("ppo_continuous", "(log_ratio.expm1() - log_ratio)", "(log_ratio.neg().expm1() + log_ratio)", "losses"),
    ("ppo_rnn", "- args.ent_coef *", "+ args.ent_coef *", "losses"),
    ("ppo_continuous", " + args.kl_coef * approx_kl", "", "losses"),
    ("ppo_discrete", "+ args.vf_coef * value_loss", "+ value_loss", "losses"),
    ("ppo_continuous", "> clip_coef).float()", "> 2 * clip_coef).float()", "losses"),
    ("ppo_discrete", '"entropy": entropy.mean()', '"entropy": entropy.mean() + 7', "losses"),
    ("ppo_continuous", "> 2 * desired_kl, lower", "< 2 * desired_kl, lower", "losses"),
    ("ppo_continuous", "& (approx_kl > 1e-9)", "", "losses: desired_kl or learning_rate"),
    ("ppo_rnn", "(returns - values).var(", "returns.var(", "losses: explained"),
    # ----------------------------------------------------------------------------------------------------- update
    ("ppo_continuous", "eps=1e-5", "eps=1e-8", "losses: adams"),
    ("ppo_discrete", "if args.max_grad_norm > 0:", "if args.max_grad_norm >= 0:", "losses discrete"),
    ("ppo_discrete", "flat_parameters, args.max_grad_norm,", "flat_parameters, 0 * args.max_grad_norm,", "losses discrete"),
    ("ppo_continuous", "flat_parameters, args.max_grad_norm,", "flat_parameters, 0.5,", "losses"),
    ("ppo_continuous", "torch.randperm(B)", "torch.arange(B)", "losses: permutations"),
    ("ppo_continuous", "> 1.5 * args.target_kl", "> args.target_kl", "losses: target_kl"),
    ("ppo_rnn", "stop_update = True  # before", "stop_update = False  # before", "losses: target_kl"),
    ("ppo_continuous", "average_over_ranks(gradient)", "pass", "ranks"),
    ("ppo_continuous", "(remaining if args.anneal_lr", "(remaining**2 if args.anneal_lr", "losses: annealing"),
    ("ppo_discrete", "remaining if args.anneal_clip", "1.0 if args.anneal_clip", "losses: annealing"),
    ("ppo_continuous", "1.0 - (iteration - 1) / num", "1.0 - iteration / num", "losses: annealing"),
    ("ppo_continuous", "if args.desired_kl is None:\n            lr", "if True:\n            lr", "losses: desired_kl"),
    ("ppo_continuous", 'metrics["approx_kl"].zero_()', "pass", "losses: desired_kl"),
    # --------------------------------------------------------------------------------- seeds, environments, episodes
    ("ppo_continuous", "[args.seed, rank, global_step]", "[args.seed, 0, global_step]", "ranks"),
    ("ppo_continuous", "[args.seed, rank, global_step]", "[args.seed, rank, 0]", "run: seed or resume"),
    ("ppo_discrete", "torch.manual_seed(noise_seed)", "pass", "run: seed"),
    ("ppo_continuous", "envs.reset(seed=env_seeds)", "envs.reset(seed=[env_seeds[0]] * N)", "run: seed"),
    ("ppo_continuous", "            np.random.seed(seed)", "            pass", "corners"),
    ("ppo_continuous", "if not shortened[n]:", "if True:", "run: stagger"),
    ("ppo_continuous", "(rank * N + np.arange(N))", "np.arange(N)", "ranks"),
    ("ppo_continuous", "shortened[n] = 0, 0, False", "shortened[n] = 0, 1, False", "run"),
    ("ppo_discrete", "episode_returns += reward", "episode_returns += np.sign(reward)", "discrete: scores"),
    ("ppo_discrete", "np.sign(reward) if args.clip_reward", "reward if args.clip_reward", "discrete"),
    ("ppo_discrete", '"life_loss_info": True', '"life_loss_info": False', "discrete"),
    ("ppo_discrete", 'False, "repeat_action_probability": 0.0', 'False, "repeat_action_probability": 0.25', "discrete"),
    ("ppo_discrete", '[1:2] == ["FIRE"]', '[1:2] == ["NOOP"]', "discrete"),
    # ------------------------------------------------------------------------------- logs, checkpoints, evaluations
    ("ppo_continuous", '["charts/learning_rate"] = lr', '["charts/learning_rate"] = 7.0', "losses run docs"),
    ("ppo_continuous", ".mean() for name in all_metrics[0]}", ".max() for name in all_metrics[0]}", "losses run"),
    ("ppo_continuous", "scalars[f\"info/{name}\"] = np.mean(", "scalars[f\"info/{name}\"] = np.sum(", "cli: info"),
    ("ppo_continuous", "maxlen=100)", "maxlen=10)", "run cli"),
    ("ppo_continuous", "- self.first_log[1]) /", "- 0) /", "run cli"),
    ("ppo_continuous", "int(match[1]) <= global_step", "int(match[1]) < global_step", "run"),
    ("ppo_continuous", "purge_step=global_step + 1", "purge_step=None", "run"),
    ("ppo_continuous", "optimizer.load_state_dict(checkpoint", "dict(checkpoint", "run: resume"),
    ("ppo_continuous", 'group["lr"].copy_(saved["lr"])', "pass", "run losses"),
    ("ppo_discrete", "% args.checkpoint_interval == 0", "% args.checkpoint_interval == 1", "run"),
    ("ppo_continuous", "env.reset(seed=seed + episode)", "env.reset(seed=seed)", "run: evaluate"),
    ("ppo_continuous", "episodic_returns[episode] += reward", "episodic_returns[episode] = reward", "run: evaluate"),
    ("ppo_continuous", "torch.random.fork_rng([device] if device.type == \"cuda\" else [])", "torch.no_grad()", "corners run"),
    # ----------------------------------------------------------------------------------------------------- memory
    ("ppo_rnn", "state.masked_fill(episode_start.unsqueeze(1), 0.0)", "state", "rnn"),
    ("ppo_rnn", "step_starts[t + 1] = terminated | truncated", "step_starts[t + 1] = terminated", "rnn"),
    ("ppo_rnn", "step_starts[0] = step_starts[T]", "step_starts[0] = False", "rnn"),
    ("ppo_rnn", "[], [], [], state\n", "[], [], [], agent.initial_state(N)\n", "rnn"),
    ("ppo_rnn", "(self.cell.hidden_size,), -1e9)", "(self.cell.hidden_size,), -1.0)", "rnn: replay or reset"),
    ("ppo_rnn", "self.memories), -1)[-1])", "self.memories), -1)[0])", "rnn"),
    ("ppo_rnn", "torch.randperm(N)", "torch.arange(N)", "rnn"),
    ("ppo_rnn", "memory_parameters, feature_gradient)", "memory_parameters, 0.5 * feature_gradient)", "rnn"),
    ("ppo_rnn", "if state is None else state)", "if True else state)", "rnn"),
    ("ppo_rnn", "-bias_ih[2 * len(shut) :]]", "0 * shut]", "rnn: replay or reset"),
    ("ppo_rnn", "rows[1:] += truncations.cumsum(0)", "pass", "rnn"),
    ("ppo_rnn", "+ 1, truncations.nonzero()", "+ 0, truncations.nonzero()", "rnn"),
    # -------------------------------------------------------------------------------------------------- simulators
    ("variants/ppo_gpu_sim", '"kl": normal_kl(minibatch["means"], minibatch["stds"], mean, std)', '"kl": normal_kl(mean, std, minibatch["means"], minibatch["stds"])', "gpu_sim"),
    ("variants/ppo_gpu_sim", "log_prob - log_tanh_slope(action)", "log_prob + log_tanh_slope(action)", "gpu_sim"),
    ("variants/ppo_gpu_sim", "rewards = torch.where(truncations, values, rewards)", "pass", "gpu_sim: brax"),
    ("variants/ppo_gpu_sim", "timeout_values = values\n", "timeout_values = 0 * values\n", "gpu_sim"),
    ("variants/ppo_gpu_sim", "rewards + args.gamma * next_returns", "rewards + next_returns", "gpu_sim: brax"),
    ("variants/ppo_gpu_sim", "agent.normalize(raw_critic_obs, agent.critic_obs_rms)", "agent.normalize(raw_critic_obs, agent.obs_rms)", "gpu_sim"),
    ("variants/ppo_gpu_sim", "[len(gradient) - critic_size, critic_size]", "[critic_size, len(gradient) - critic_size]", "gpu_sim"),
    ("variants/ppo_gpu_sim", "truncations[t] &= ~terminations[t]", "pass", "gpu_sim"),
    ("variants/ppo_gpu_sim", "args.reward_scale * rewards", "rewards", "gpu_sim"),
    ("variants/ppo_gpu_sim", "= stds.mean()", "= 7 * stds.mean()", "gpu_sim: noise_std"),
    ("variants/ppo_gpu_sim", "torch.randperm(C, device=device)", "torch.arange(C, device=device)", "gpu_sim: shuffling"),
    ("variants/ppo_gpu_sim", "softplus(scale) + 1e-3", "softplus(scale) + 1e-1", "gpu_sim"),
    ("variants/ppo_gpu_sim", "eps=1e-8, foreach", "eps=1e-5, foreach", "gpu_sim: update"),
    ("variants/ppo_gpu_sim", 'obs.get("critic", obs["policy"])', 'obs["policy"]', "gpu_sim: privileged or groups"),
    ("variants/ppo_gpu_sim", "running &= ~(terminations | truncations)", "running &= ~terminations", "gpu_sim: evaluation"),
    ("variants/ppo_gpu_sim", "agent.obs_rms.update(raw_obs[:T])", "agent.obs_rms.update(raw_obs)", "gpu_sim: statistics"),
    ("variants/ppo_gpu_sim", "shortened.fill_(True)", "shortened.fill_(False)", "gpu_sim: stagger"),
    ("variants/ppo_gpu_sim", "x.unflatten(0, (-1, L)).transpose(0, 1)", "x.unflatten(0, (L, -1))", "gpu_sim"),
    # --------------------------------------------------------------------------------------------- language models
    ("variants/ppo_rlhf", "- is_eos == 0", "== 0", "rlhf: answer"),
    ("variants/ppo_rlhf", "logits[:, -R - 1 : -1].float()", "logits[:, -R:].float()", "rlhf"),
    ("variants/ppo_rlhf", ".float() / temperature", ".float() * temperature", "rlhf"),
    ("variants/ppo_rlhf", "[:, -mask.shape[1] - 1 : -1]", "[:, -mask.shape[1] :]", "rlhf"),
    ("variants/ppo_rlhf", "(-kl_coef * kl)", "(kl_coef * kl)", "rlhf"),
    ("variants/ppo_rlhf", "scores.clamp(-clip_reward, clip_reward)", "scores", "rlhf"),
    ("variants/ppo_rlhf", "values[:, 1:], (0, 1)", "values[:, :-1], (1, 0)", "rlhf"),
    ("variants/ppo_rlhf", "kl / kl_target - 1", "1 - kl / kl_target", "rlhf: adaptive"),
    ("variants/ppo_rlhf", "- 1).clamp(min=0)", ").clamp(min=0)", "rlhf"),
    ("variants/ppo_rlhf", '"old_approx_kl": -log_ratio.mean()', '"old_approx_kl": log_ratio.mean()', "rlhf"),
    ("variants/ppo_rlhf", '"charts/kl": kl.sum(-1).mean()', '"charts/kl": kl.mean()', "rlhf"),
    ("variants/ppo_rlhf", "(kl.neg().expm1() + kl)", "(kl.expm1() - kl)", "rlhf"),
    ("variants/ppo_rlhf", "critic.parameters(), betas=(0.9, 0.95)", "critic.parameters(), betas=(0.9, 0.999)", "rlhf: update"),
    ("variants/ppo_rlhf", "torch.randperm(B)", "torch.arange(B)", "rlhf"),
    ("variants/ppo_rlhf", ">= args.min_response_length", "> args.min_response_length", "rlhf: min_response"),
    ("variants/ppo_rlhf", "mb_advantages.std() + 1e-8", "mb_advantages.var() + 1e-8", "rlhf: norm_adv"),
    ("variants/ppo_rlhf", "[args.seed, rank, iteration]", "[args.seed, rank, 0]", "rlhf"),
    ("variants/ppo_rlhf", "mb_returns, args.vf_clip_coef)", "mb_returns, None)", "rlhf"),
    ("variants/ppo_rlhf", "average_over_ranks(parameter.grad)", "pass", "rlhf: ranks"),
    ("variants/ppo_rlhf", "[seed, which_pass]", "[seed, 0]", "rlhf: prompt"),
]


def words_of(mutant):
    """What pytest is given: files, and which tests of them."""
    script, _, _, tests = mutant
    files, _, names = tests.partition(": ")
    chosen = [script.split("/")[-1]] if not script.startswith("variants") and files != "rnn" else []
    chosen += [f"({names})"] if names else []
    words = [f"tests/test_{name}.py" for name in files.split()]
    return [*words, *(["-k", " and ".join(chosen)] if chosen else [])]


def try_out(mutant):
    """Run the tests in a copy of the repository. Returns the name of the test that failed, or None."""
    script, text, replacement, _ = mutant
    with tempfile.TemporaryDirectory() as folder:
        tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
        for name in tracked.splitlines():
            (Path(folder) / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, Path(folder) / name)
        path = Path(folder) / f"{script}.py"
        path.write_text(path.read_text().replace(text, replacement, 1))
        command = [sys.executable, "-m", "pytest", "-x", "-n", "0", "-p", "no:cacheprovider", *words_of(mutant)]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": ""})
    if done.returncode not in (0, 1):
        raise RuntimeError(f"{mutant}: pytest ended with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-500:]}")
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.M)
    return (failed[1] if failed else "?") if done.returncode else None


def main():
    chosen = [m for m in MUTANTS if not sys.argv[1:] or any(word in " ".join(m) for word in sys.argv[1:])]
    for script, text, *_ in chosen:
        if text not in (ROOT / f"{script}.py").read_text():
            raise SystemExit(f"mutants.py: error: {script}.py has no {text!r} any more")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    survivors = []
    with ThreadPoolExecutor(cores) as pool:
        for number, (mutant, killer) in enumerate(zip(chosen, pool.map(try_out, chosen)), 1):
            print(f"[{number}/{len(chosen)}] {mutant[0]}: {mutant[2]!r}: {killer or 'SURVIVED'}", flush=True)
            survivors += [] if killer else [mutant]
    print(f"{len(chosen) - len(survivors)} of {len(chosen)} mutants were noticed")
    for script, text, replacement, tests in survivors:
        print(f"survived: {script}.py, {text!r} -> {replacement!r}, by the tests of {tests}")
    raise SystemExit(bool(survivors))


if __name__ == "__main__":
    main()
