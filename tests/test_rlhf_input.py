"""variants/ppo_rlhf.py: the command line, and one line for what users may give by mistake."""

import io
import json
import sys

import pytest
import torch
from conftest import flags_of
from filelock import FileLock
from rlhf import ppo_rlhf, rows, save, transformers

pytest_plugins = "rlhf_fixtures"


def test_a_sweep_command_line():
    """As `wandb sweep` builds it."""
    line = "--track=False --kl_coef=0.1 --model=None --micro_batch_size=6 --batch_size=64.0"
    args = ppo_rlhf.parse_args([*line.split(), "--total-episodes=1e3", "--anneal_lr=False"])
    assert (args.track, args.kl_coef, args.model, args.micro_batch_size) == (False, 0.1, None, 6)
    assert (args.batch_size, args.total_episodes, args.anneal_lr) == (64, 1000, False)
    assert ppo_rlhf.parse_args([]) == ppo_rlhf.Args()


@pytest.fixture(scope="module")
def others(tmp_path_factory):
    """What users may give by mistake."""
    folder = tmp_path_factory.mktemp("others")
    words = {word: number for number, word in enumerate(["<eos>", "other", "words"])}
    tokenizer = ppo_rlhf.tokenizers.Tokenizer(ppo_rlhf.tokenizers.models.WordLevel(words, unk_token="<eos>"))
    other = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<eos>")
    _, _, reward_model = ppo_rlhf.make_builtin_models(ppo_rlhf.Args(supervised_steps=1))
    save(reward_model, other, folder / "other")
    texts = {"empty.txt": "how is the soup ?\n\nhow is the cake ?\n", "nothing.txt": "", "long.txt": "soup " * 59}
    texts |= {"chat.jsonl": CHAT + "\n", "null.jsonl": '{"prompt": "soup"}\n{"prompt": null}\n'}
    texts |= {"bad.jsonl": '{"text": "soup"}\n', "blank.jsonl": '{"prompt": "soup\u2028"}\n{"prompt": "  "}\n'}
    texts |= {
        "cut.jsonl": '{"prompt": "soup"}\n{"prompt": "so',
        "lines.txt": '{"prompt": "soup"}\n{"prompt": "cake"}\n',
    }
    texts |= {"list.jsonl": '[{"prompt": "soup"}]', "plain.jsonl": "how is the soup ?\n"}
    texts |= {"pretty.txt": '[\n  {\n    "prompt": "soup"\n  }\n]\n', "data.txt": "PAR1\0\0\x15"}
    texts |= {"table.csv": "prompt,answer\nsoup,good\n"}
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")  # U+2028 ends no line of a file
    (folder / "latin.txt").write_text("a caf\u00e9\n", encoding="latin-1")
    return folder


CHAT = '{"prompt": [{"role": "user", "content": "how is the soup ?"}]}'
FORMS = "write .txt, a prompt per line, or .jsonl,"
TOGETHER = "give --model, --prompts and either --reward-model or --reward"
BAD = {
    "another tokenizer": ({"reward_model": "HERE/other"}, "HERE/other and --model FOLDERS/model need one vocabulary"),
    "no reward model": (
        {"reward_model": "FOLDERS/model"},
        "is not a SequenceClassification: it lacks score.weight",
    ),
    "no such model": ({"model": "FOLDERS/nowhere"}, "FOLDERS/nowhere"),
    "empty prompt": ({"prompts": "HERE/empty.txt"}, "empty.txt, line 2: the prompt is empty"),
    "blank prompt": ({"prompts": "HERE/blank.jsonl"}, "blank.jsonl, line 2: the prompt is empty"),
    "no prompts": ({"prompts": "HERE/nothing.txt"}, "nothing.txt, line 1: the prompt is empty"),
    "prompt too long": (
        {"prompts": "HERE/long.txt"},
        "line 1: 59 tokens and --response-length exceed the context of 64",
    ),
    "answers too long": (
        {"model": None, "reward_model": None, "prompts": None, "response_length": 64, "supervised_steps": 1},
        "the built-in task, line 1: 5 tokens and --response-length exceed the context of 64",
    ),
    "no file": ({"prompts": "HERE/nowhere.txt"}, "No such file or directory: 'HERE/nowhere.txt'"),
    "no chat template": ({"prompts": "HERE/chat.jsonl"}, "chat.jsonl, line 1 is not"),
    "null": ({"prompts": "HERE/null.jsonl"}, 'null.jsonl, line 2 is not {"prompt": "..."} or {"prompt": [{"role":'),
    "no prompt in it": ({"prompts": "HERE/bad.jsonl"}, "bad.jsonl, line 1 is not"),
    "half a line": ({"prompts": "HERE/cut.jsonl"}, "cut.jsonl, line 2 is not"),
    "one array": ({"prompts": "HERE/list.jsonl"}, "list.jsonl, line 1 is not"),
    "JSON in .txt": ({"prompts": "HERE/lines.txt"}, FORMS),
    "indented JSON": ({"prompts": "HERE/pretty.txt"}, FORMS),
    "no text": ({"prompts": "HERE/data.txt"}, FORMS),
    "text in .jsonl": ({"prompts": "HERE/plain.jsonl"}, FORMS),
    "a table": ({"prompts": "HERE/table.csv"}, FORMS),
    "not UTF-8": ({"prompts": "HERE/latin.txt"}, "--prompts HERE/latin.txt: 'utf-8' codec can't decode byte 0xe9"),
    "models without prompts": ({"prompts": None}, TOGETHER),
    "model without rewards": ({"reward_model": None}, TOGETHER),
    "two rewards": ({"reward": "math:sqrt"}, TOGETHER),
    "no such function": ({"reward_model": None, "reward": "math:no"}, "--reward math:no: write MODULE:FUNCTION"),
    "no function": ({"reward_model": None, "reward": "math"}, "--reward math: write MODULE:FUNCTION"),
    "no such module": ({"reward_model": None, "reward": "nowhere:score"}, "No module named 'nowhere'"),
    "no such module in a package": (
        {"reward_model": None, "reward": "xml.nowhere:score"},
        "No module named 'xml.nowhere'",
    ),
    "indivisible": ({"num_minibatches": 3}, "--batch-size must be a multiple of num_minibatches * processes = 3"),
    "too short": ({"total_episodes": 7}, "--total-episodes must be at least batch_size = 8"),
    "nothing to resume": ({"resume": "nowhere"}, "nowhere/checkpoint.pt"),
    "nothing to evaluate": ({"evaluate": "nowhere"}, "nowhere/checkpoint.pt"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input(rlhf_args, model_folders, others, case, main, tmp_path):
    changes, message = BAD[case]
    message = message.replace("HERE", str(others)).replace("FOLDERS", str(model_folders))
    flags = {name: value for name, value in (vars(rlhf_args()) | changes).items() if value is not None}
    flags = [x.replace("HERE", str(others)).replace("FOLDERS", str(model_folders)) for x in flags_of(**flags)]
    refused = main(ppo_rlhf, *flags)
    assert refused.returncode == 2 and len(refused.stderr.splitlines()) == 1, refused.stderr
    assert refused.stderr.startswith("ppo_rlhf.py: error: ") and message in refused.stderr
    assert not (tmp_path / "runs").exists()


def test_a_resumed_run_keeps_what_it_began_with(rlhf_args, main):
    _, run_dir = ppo_rlhf.train(rlhf_args(total_episodes=8))
    refused = main(ppo_rlhf, "--resume", run_dir, "--batch-size=4")
    assert refused.returncode == 2 and f"{run_dir} began with --batch-size 8" in refused.stderr
    with FileLock(run_dir / "lock"):
        refused = main(ppo_rlhf, "--resume", run_dir, "--total-episodes=16")
    assert refused.returncode == 2 and f"another process is training in {run_dir}" in refused.stderr


def tokens(args, *models):
    return [models[0].decode(ids) for ids, _ in ppo_rlhf.load_prompts(args, *models)]


def test_prompt_files(models, rlhf_args, tmp_path, capsys):
    """Lines that Windows wrote, with its mark at the beginning; brackets that are no JSON; U+2028."""
    wanted = ["how is the soup ?", "how is the cake ?"]
    for name, text in {
        "plain.txt": "how is the soup ?\nhow is the cake ?",
        "windows.txt": "\ufeffhow is the soup ?\r\nhow is the cake ?\r\n",
        "windows.jsonl": '\ufeff{"prompt": "how is the soup ?"}\r\n{"id": 3, "prompt": "how is the cake ?"}\r\n',
        "spaced.jsonl": '{ "prompt": "how is the soup ?" }\n{ "prompt": "how is the cake ?" }\n',
    }.items():
        (tmp_path / name).write_bytes(text.encode())
        assert tokens(rlhf_args(prompts=str(tmp_path / name)), *models) == wanted
    (tmp_path / "brackets.txt").write_text("[INST] soup\u2028cake\n{soup}\n", encoding="utf-8")
    assert len(tokens(rlhf_args(prompts=str(tmp_path / "brackets.txt")), *models)) == 2
    assert capsys.readouterr() == ("", "")


TEMPLATE = (
    "{% for m in messages %}us {{ m['content'] }} <eos> {% endfor %}{% if add_generation_prompt %}it is{% endif %}"
)


def test_chat_template(models, rlhf_args, tmp_path, capsys):
    """Messages get the template, once. Plain texts are taken as they are, and one line says how to apply it."""
    (tmp_path / "chat.jsonl").write_text(CHAT + "\n" + CHAT.replace("soup", "cake") + "\n")
    (tmp_path / "rendered.jsonl").write_text('{"prompt": "us how is the soup ? <eos> it is"}\n')
    (tmp_path / "plain.jsonl").write_text('{"prompt": "how is the soup ?"}\n{"prompt": "the role ?"}\n')
    models[0].chat_template = TEMPLATE
    for name, hint in (("chat", False), ("rendered", False), ("plain", True)):
        texts = tokens(rlhf_args(prompts=str(tmp_path / f"{name}.jsonl")), *models)
        assert texts[0] == ("how is the soup ?" if hint else "us how is the soup ? <eos> it is")
        printed = capsys.readouterr().err
        assert len(printed.splitlines()) == hint and ('{"prompt": [{"role": "user",' in printed) == hint


def test_a_function_gives_the_rewards(rlhf_args, main, tmp_path, monkeypatch):
    """Which gets the lines of the prompts file, of a .jsonl whole objects, and answers without special tokens. The
    critic begins as the language model, with values of 0. --evaluate imports the function only if the command names it
    again."""
    (tmp_path / "count_words.py").write_text(
        "calls = []\n\n"
        "def length(prompts, answers):\n"
        "    calls.append((prompts, answers))\n"
        "    return [len(answer.split()) / 3 for answer in answers]\n\n"
        "def too_few(prompts, answers):\n    return [1.0]\n\n"
        "def lost(prompts, answers):\n    return open('no such file')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    given = {"reward_model": None, "micro_batch_size": 3}
    _, run_dir = ppo_rlhf.train(rlhf_args(**given, reward="count_words:length", kl_coef=0.0, total_episodes=8))
    [(prompts, answers)] = sys.modules.pop("count_words").calls
    assert len(prompts) == len(answers) == 8 and prompts[0] in ppo_rlhf.BUILTIN_PROMPTS
    assert not any("<eos>" in text for text in answers)
    (row,) = rows(run_dir)
    assert float(row["charts/reward"]) == pytest.approx(sum(len(x.split()) / 3 for x in answers) / 8, rel=1e-5)
    assert float(row["charts/reward"]) > 0 and abs(float(row["losses/values"])) < 0.05
    refused = main(ppo_rlhf, "--evaluate", run_dir)
    assert refused.returncode == 2 and "if you trust it, add --reward count_words:length" in refused.stderr
    assert "count_words" not in sys.modules
    evaluated = main(ppo_rlhf, "--evaluate", run_dir, "--reward=count_words:length", "--eval-episodes=7")
    assert evaluated.returncode == 0 and "7 answers: mean reward" in evaluated.stdout, evaluated.stderr
    objects = [{"prompt": prompt, "answer": len(prompt)} for prompt in ppo_rlhf.BUILTIN_PROMPTS]
    (tmp_path / "objects.jsonl").write_text("".join(json.dumps(x) + "\n" for x in objects))
    paths = {"prompts": str(tmp_path / "objects.jsonl"), "reward": "count_words:length"}
    ppo_rlhf.train(rlhf_args(**given | paths, total_episodes=8))
    assert all(line in objects for line in sys.modules["count_words"].calls[-1][0])
    with pytest.raises(ppo_rlhf.UsageError, match=r"count_words:too_few gave scores of shape \(1,\), not \(8,\)"):
        ppo_rlhf.train(rlhf_args(**given, reward="count_words:too_few"))
    with pytest.raises(RuntimeError, match="--reward count_words:lost failed"):  # not one line without the place
        ppo_rlhf.train(rlhf_args(**given, reward="count_words:lost"))
    with pytest.raises(ppo_rlhf.UsageError, match=r"--reward count_words\.py:length: write MODULE:FUNCTION"):
        ppo_rlhf.train(rlhf_args(**given, reward="count_words.py:length"))


def test_a_model_in_a_function_keeps_its_precision(rlhf_args, tmp_path, monkeypatch):
    """On CUDA the script's own models compute in bfloat16, whose 1,000 + 3 is 1,004. A user's do not."""
    (tmp_path / "ones.py").write_text(
        "import torch\n\ndef score(prompts, answers):\n    return torch.ones(len(prompts), 1003) @ torch.ones(1003)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with torch.autocast("cpu", torch.bfloat16):
        args, texts = rlhf_args(reward="ones:score"), ["a", "b"]
        scores = ppo_rlhf.score_answers(args, None, torch.zeros(1, 2), texts, texts, 2)
    assert scores.tolist() == [1003, 1003]


def test_text_that_the_terminal_cannot_encode(rlhf_args, monkeypatch):
    """Is shown with question marks; the run goes on."""
    terminal = io.TextIOWrapper(io.BytesIO(), encoding="cp1252")
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setattr(ppo_rlhf, "decode", lambda *_: [("\u6c64 soup", "caf\u00e9 \U0001f35c")] * 8)
    _, run_dir = ppo_rlhf.train(rlhf_args(total_episodes=8))
    terminal.flush()
    assert "? soup -> caf\u00e9 ?" in terminal.buffer.getvalue().decode("cp1252") and len(rows(run_dir)) == 1
