"""What CUDA asks of a script, tried without a GPU: functions recorded as graphs, and no needless waiting."""

import contextlib
import sys
from collections import Counter

import pytest
import torch
from conftest import SMALL, probe, scalars
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Graph:
    """A CUDA graph on the CPU: operators with the tensors of the recording. A replay computes into the same tensors."""

    replays = 0

    def __init__(self):
        self.operators = []

    @torch.no_grad()
    def replay(self):
        Graph.replays += 1
        for operator, arguments, options, results in self.operators:
            for old, new in zip(tree_leaves(results), tree_leaves(operator(*arguments, **options))):
                if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():  # neither a view nor in place
                    old.copy_(new)


class Recording(TorchDispatchMode):
    def __init__(self, graph):
        super().__init__()
        self.graph, self.before = graph, {}

    def __torch_dispatch__(self, operator, types, arguments=(), options=None):
        assert operator is not torch.ops.aten._local_scalar_dense.default, "a graph cannot wait for a number"
        for argument, schema in zip(arguments, operator._schema.arguments):
            if schema.alias_info and schema.alias_info.is_write:
                self.before.setdefault(id(argument), (argument, argument.clone()))
        results = operator(*arguments, **(options or {}))
        self.graph.operators.append((operator, arguments, options or {}, results))
        return results


@contextlib.contextmanager
def record_on_cpu(graph):
    """In place of torch.cuda.graph. Operators run; random numbers and tensors that existed before are put back."""
    random_state = torch.get_rng_state()
    with Recording(graph) as recording:
        yield
    torch.set_rng_state(random_state)
    with torch.no_grad():
        for tensor, value in recording.before.values():
            tensor.copy_(value)


class Cuda(str):
    """A device that says it is CUDA, where tensors go to the CPU."""

    type = "cuda"


@pytest.fixture
def cuda(script, monkeypatch):
    """A GPU for the script, made of the CPU: the device says that it is CUDA, and graphs are those above. Compiled
    functions stay as they are: a graph of them would have no operators to record."""
    stand_ins = [
        (script, "start_device", lambda *_, **__: Cuda("cpu")),
        (script, "compiled", lambda function, **_: function),
        (torch.cuda, "CUDAGraph", Graph),
        (torch.cuda, "graph", record_on_cpu),
        (torch.Tensor, "pin_memory", lambda tensor: tensor),
        (sys.modules["torch.optim.adam"], "_get_capturable_supported_devices", lambda: ["cpu"]),
    ]
    for owner, name, stand_in in stand_ins:
        monkeypatch.setattr(owner, name, stand_in)


@pytest.mark.parametrize(
    "flags",
    [
        {"anneal_clip": True, "clip_vloss": True, "desired_kl": 0.01, "recompute_advantages": True},
        {"anneal_lr": True, "target_kl": 0.002, "norm_obs": False},
    ],
    ids=["desired", "target"],
)
def test_recorded_functions_give_the_same_run(script, small_args, flags, cuda):
    """Ten iterations, five of them after --resume: numbers that change reach a replay, and no step counts twice."""

    def train(compile):  # --no-compile records nothing
        _, run_dir = script.train(small_args(**flags, compile=compile, total_timesteps=320))
        # The same annealing, to another end.
        agent, _ = script.train(small_args(**flags, compile=compile, total_timesteps=640, resume=str(run_dir)))
        return agent.state_dict(), scalars(run_dir)

    replays = Graph.replays
    weights, metrics = train(compile=False)
    assert Graph.replays == replays
    new_weights, new_metrics = train(compile=True)
    assert Graph.replays >= replays + 10 * SMALL["num_steps"] - 2
    for name, tensor in weights.items():
        assert torch.equal(new_weights[name], tensor), name
    losses = [name for name in metrics if name.startswith("losses/")]
    assert "losses/approx_kl" in losses
    for name in losses:
        assert new_metrics[name] == metrics[name], name


LEAVES = {"item", "tolist", "cpu", "cuda", "nonzero", "__bool__", "__int__", "__float__"}


class Waits(TorchFunctionMode):
    """Counts what a GPU would be waited for: numbers and arrays that leave it, what is uploaded, indexing by a mask."""

    def __init__(self):
        super().__init__()
        self.count = Counter()

    def __torch_function__(self, function, types, arguments=(), options=None):
        name, caller = function.__name__, sys._getframe(1).f_code.co_filename
        is_mask = "getitem" in name or "setitem" in name
        masks = [x for x in tree_leaves(arguments[1:2]) if isinstance(x, torch.Tensor) and x.dtype == torch.bool]
        # torch's own calls of `to` go from a device to the same one.
        is_own = "site-packages" not in caller
        to_device = name == "to" and is_own and any(isinstance(x, torch.device) for x in arguments[1:])
        is_adam = "/torch/optim/" in caller  # on CUDA it counts its steps in a tensor
        if (name in LEAVES or to_device or (is_mask and masks)) and not is_adam:
            self.count[name] += 1
        return function(*arguments, **(options or {}))


def test_waits(script, small_args):
    """A step waits for its actions only. A minibatch waits for nothing, but ppo_rnn.py for the length of its replay."""

    def count(**changes):
        args = small_args(**({"num_minibatches": 2, "norm_reward": False, "target_kl": None} | changes))
        args.total_timesteps = args.num_steps * args.num_envs  # one iteration
        with Waits() as waits:
            script.train(args)
        return waits.count

    once = count(env_id=probe(script, "Target"))
    assert count(num_steps=32) - once == Counter(cpu=16)
    minibatches = 2 * SMALL["update_epochs"]
    assert count(num_minibatches=4) - once == Counter(__int__=minibatches if script.__name__ == "ppo_rnn" else 0)
    kl = count(num_minibatches=4, target_kl=1e9) - count(num_minibatches=2, target_kl=1e9)
    assert kl["item"] == minibatches
