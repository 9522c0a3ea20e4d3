"""The trainer's parts on their own: configuration, data, model, memory formula."""

import dataclasses
import json
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from moestro.train import config as settings
from moestro.train import data, kept, metrics, report
from moestro.train.config import TrainConfig
from moestro.train.errors import TrainError
from moestro.train.loop import learning_rate
from moestro.train.model import LanguageModel, MoEBlock, rotate

# Configuration

TOML = 'preset = "small"\nsteps = 7\n[training]\nlr = 1\n[data]\ndata = ["a", "b"]\n'


def test_flags_over_file_over_preset_over_defaults(tmp_path):
    file = tmp_path / "c.toml"
    file.write_text(TOML)
    config, preset, explicit = settings.build(None, str(file), {"steps": 9})
    assert preset == "small"
    assert config.steps == 9  # flag
    assert config.lr == 1.0 and config.data == ("a", "b")  # file
    assert config.d_model == settings.PRESETS["small"]["d_model"]  # preset
    assert config.clip == TrainConfig.clip  # default
    assert explicit == {"steps", "lr", "data"}
    assert settings.build("tiny", str(file), {})[1] == "tiny"  # a flag's preset beats the file's


def test_json_and_toml_agree(tmp_path):
    (tmp_path / "c.toml").write_text(TOML)
    (tmp_path / "c.json").write_text(
        json.dumps({"preset": "small", "steps": 7, "training": {"lr": 1}, "data": {"data": ["a", "b"]}})
    )
    assert settings.build(None, str(tmp_path / "c.toml"), {}) == settings.build(
        None, str(tmp_path / "c.json"), {}
    )


@pytest.mark.parametrize(
    "content, says",
    [
        ('{"model": {"lr": 1}}', "unknown setting 'model.lr'"),  # in the wrong table
        ('{"lr": 1, "training": {"lr": 2}}', "sets 'lr' twice"),
        ('{"report": 1}', "expected bool, got 1"),
        ('{"steps": true}', "expected int, got True"),
        ('{"data": [1]}', "expected a list of paths"),
        ("[1]", "expected a table of settings"),
    ],
)
def test_files_that_are_wrong(tmp_path, content, says):
    (tmp_path / "c.json").write_text(content)
    with pytest.raises(TrainError, match="(?s)" + says.replace("[", r"\[")):
        settings.build(None, str(tmp_path / "c.json"), {})


def test_a_configuration_survives_its_checkpoint():
    config, _, _ = settings.build("small", None, {"data": ["x"], "lr": 0.1})
    assert settings.from_dict(json.loads(json.dumps(config.as_dict()))) == config


@pytest.mark.parametrize("preset", settings.PRESETS)
def test_presets_are_valid(preset):
    settings.build(preset, None, {})


def test_learning_rate_warms_up_then_falls():
    config = TrainConfig(steps=100, warmup=10, lr=1.0, min_lr_ratio=0.1)
    rates = [learning_rate(config, step) for step in range(100)]
    assert rates[0] == pytest.approx(0.1) and rates[9] == rates[10] == 1.0
    assert rates[99] == pytest.approx(0.1)
    assert rates[10:] == sorted(rates[10:], reverse=True)


# Data


@pytest.fixture
def folder(tmp_path):
    for i in range(60):
        path = tmp_path / "root" / f"d{i % 3}" / f"f{i}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"file {i} " * 40)
    for name in (".hidden.txt", "image.png", "__pycache__/x.py", ".git/config.txt"):
        path = tmp_path / "root" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("never read")
    return tmp_path / "root"


def corpus(**values):
    return data.load_corpus(TrainConfig(**{"seq_len": 8, **values}))


def test_the_split_depends_on_paths_alone(folder):
    first = corpus(data=(str(folder),), val_fraction=0.2)
    text = bytes(first.train[first.train < 256].astype(np.uint8)).decode()
    held_out = bytes(first.val[first.val < 256].astype(np.uint8)).decode()
    names = {f"d{i % 3}/f{i}.txt": f"file {i} " * 40 for i in range(60)}
    for key, content in names.items():
        assert (content in held_out) == data.in_validation(key, 0.2)
        assert (content in text) != (content in held_out)
    assert "never read" not in text + held_out
    another = next(
        name for name in map("more{}.txt".format, range(99)) if not data.in_validation(f"d0/{name}", 0.2)
    )
    (folder / "d0" / another).write_text("more")
    moved = folder.rename(folder.parent / "elsewhere")
    second = corpus(data=(str(moved),), val_fraction=0.2)
    assert np.array_equal(first.val, second.val)


def test_the_rule_of_the_split_is_fixed():
    assert [i for i in range(12) if data.in_validation(f"f{i}.txt", 0.3)] == [4, 6, 9]


def test_one_file_is_cut_by_position(tmp_path):
    (tmp_path / "a.log").write_bytes(bytes(range(256)) * 4)
    got = corpus(data=(str(tmp_path / "a.log"),), val_fraction=0.25)
    assert len(got.train) == 769 and len(got.val) == 256
    assert np.array_equal(np.concatenate([got.train, got.val]), [*list(range(256)) * 4, data.END_OF_DOCUMENT])


def test_validation_data_of_its_own(tmp_path):
    (tmp_path / "a.txt").write_text("training " * 9)
    (tmp_path / "b.txt").write_text("validate " * 9)
    got = corpus(data=(str(tmp_path / "a.txt"),), val_data=(str(tmp_path / "b.txt"),))
    assert bytes(got.val[:8].astype(np.uint8)) == b"validate" and len(got.train) == len(got.val) == 82


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "int32", "uint32"])
def test_token_files_are_mapped(tmp_path, dtype):
    tokens = (np.arange(5000) % 200).astype(dtype)
    tokens.tofile(tmp_path / "t.bin")
    np.save(tmp_path / "t.npy", tokens)
    for name in ("t.bin", "t.npy"):
        got = corpus(data=(str(tmp_path / name),), bin_dtype=dtype, val_fraction=0.1)
        assert isinstance(got.train, np.memmap) and got.unit == "token"
        assert np.array_equal(got.train, tokens[:4500]) and np.array_equal(got.val, tokens[4500:])


def test_the_default_is_the_standard_library():
    got = data.load_corpus(TrainConfig())
    assert got.unit == "byte" and len(got.train) > 1 << 20 and len(got.val) > 1 << 16
    assert b"def heappush(" in bytes(np.concatenate([got.train, got.val]).astype(np.uint8))


def test_an_epoch_visits_every_window_once():
    tokens = np.arange(1000, dtype=np.uint16)
    batches = data.Batches(tokens, batch_size=1, seq_len=7, seed=3)
    seen = []
    while batches.epoch == 0:
        seen.append(batches.next())
    first = torch.cat(seen[:-1])  # the last one is of the next epoch
    assert torch.equal(first[:, 1:], first[:, :-1] + 1)
    starts = first[:, 0].sort().values
    assert torch.equal(starts.diff(), torch.full((len(starts) - 1,), 7))
    assert len(starts) >= (1000 - 1 - 7) // 7
    assert not torch.equal(first[:, 0], starts)


def test_batches_go_on_where_they_were():
    tokens = np.arange(300, dtype=np.uint16)
    batches = data.Batches(tokens, 4, 7, seed=1)
    for _ in range(17):  # into the second epoch
        batches.next()
    other = data.Batches(tokens, 4, 7, seed=1)
    other.restore(batches.state())
    assert batches.epoch >= 1
    for _ in range(20):
        assert torch.equal(batches.next(), other.next())


def test_batches_of_hardly_enough_tokens():
    batches = data.Batches(np.arange(10, dtype=np.uint16), 3, 8, seed=0)
    assert batches.next().shape == (3, 9)


def test_unigram_bits_are_the_cross_entropy_of_counts():
    train = np.array([0] * 6 + [1] * 2 + [data.END_OF_DOCUMENT], dtype=np.uint16)
    window = torch.tensor([[7, 0, 1, 0, data.END_OF_DOCUMENT]])  # the first is input only
    probability = {0: 7 / 273, 1: 3 / 273, data.END_OF_DOCUMENT: 2 / 273}
    bits = (
        -math.log2(probability[0]) * 2
        - math.log2(probability[1])
        - math.log2(probability[data.END_OF_DOCUMENT])
    )
    assert data.unigram_bits(train, [window], 264, "byte") == pytest.approx(bits / 3)
    assert data.unigram_bits(train, [window], 264, "token") == pytest.approx(bits / 4)


# Model


def test_eager_experts_against_the_plain_sum():
    torch.manual_seed(0)
    moe = MoEBlock(TrainConfig(d_model=6, d_ff=5, num_experts=4, top_k=2, experts_backend="eager")).double()
    x = torch.randn(11, 6, dtype=torch.float64)
    y = moe(x)
    logits = x @ moe.router.weight.T
    for t in range(11):
        chosen = logits[t].topk(2).indices
        weights = logits[t][chosen].softmax(0)
        want = sum(
            w
            * (
                moe.experts.w_down[e]
                @ (F.silu(moe.experts.w_up[e, :5] @ x[t]) * (moe.experts.w_up[e, 5:] @ x[t]))
            )
            for e, w in zip(chosen.tolist(), weights)
        )
        assert torch.allclose(y[t], want, rtol=1e-9)
    assert moe.counts.sum() == 22


@pytest.mark.parametrize("top_k", [1, 2, 4])
def test_backends_agree_on_output_losses_and_gradients(top_k):
    blocks, state = [], None
    x_values = torch.randn(50, 6, dtype=torch.float64)
    for backend in ("moestro", "eager"):
        config = TrainConfig(d_model=6, d_ff=5, num_experts=4, top_k=top_k, experts_backend=backend)
        block = MoEBlock(config).double()
        block.load_state_dict(state := state or block.state_dict())
        x = x_values.clone().requires_grad_()
        y = block(x)
        (y.square().sum() + block.balance_loss + block.z_loss).backward()
        grads = {name: parameter.grad for name, parameter in block.named_parameters()}
        assert all(grad is not None for grad in grads.values())
        blocks.append({"y": y, "dx": x.grad, "balance": block.balance_loss, "z": block.z_loss, **grads})
        assert block.counts.sum() == 50 * top_k
    for name, value in blocks[0].items():
        assert value.abs().max() > 0 and torch.allclose(value, blocks[1][name], rtol=1e-9, atol=1e-12), name


def test_rotation_depends_on_distance_alone():
    angles = torch.outer(torch.arange(10.0), 100.0 ** (-torch.arange(4.0) / 4))
    q, k = torch.randn(8), torch.randn(8)
    q10, k10 = (rotate(v.expand(10, 8), angles.cos(), angles.sin()) for v in (q, k))
    assert torch.allclose(q10[5] @ k10[2], q10[9] @ k10[6], atol=1e-5)
    assert torch.allclose(q10.norm(dim=1), q.norm().expand(10))


SMALL = TrainConfig(
    d_model=16,
    num_layers=2,
    num_heads=2,
    seq_len=12,
    num_experts=4,
    top_k=2,
    d_ff=8,
    dense_layers=1,
    experts_backend="eager",
)


def test_the_model_cannot_see_the_future():
    torch.manual_seed(0)
    model = LanguageModel(SMALL)
    tokens = torch.randint(0, 256, (2, 12))
    changed = tokens.clone()
    changed[:, 7:] = (changed[:, 7:] + 1) % 256
    before, after = model(tokens), model(changed)
    assert torch.allclose(before[:, :7], after[:, :7], atol=1e-5)
    assert not torch.allclose(before[:, 7:], after[:, 7:], atol=1e-3)


def test_parameters_are_counted():
    model = LanguageModel(SMALL)
    total, active = model.num_parameters()
    norms, attention = 2 * 2 * 16 + 16, 2 * 4 * 16 * 16
    dense, moe, router = 3 * 16 * 16, 4 * 3 * 16 * 8, 4 * 16
    assert total == 264 * 16 + norms + attention + dense + moe + router
    assert total - active == 2 * 3 * 16 * 8
    assert len(model.moe_layers) == 1


# Memory and metrics


@pytest.mark.parametrize("dtype, size", [("f32", 4), ("bf16", 2)])
def test_kept_bytes_are_as_planned(dtype, size):
    config = dataclasses.replace(SMALL, dtype=dtype, batch_size=5, experts_backend="moestro")
    got = kept.compare(config, LanguageModel(config), torch.device("cpu"))
    rows, n, d = 5 * 12 * 2, 8, 16
    assert got["layers"] == 1
    assert got["measured"] == {policy: got["planned"][policy] for policy in kept.POLICIES}
    # Alignment rounds each part up, to 256 bytes at most.
    assert 0 <= got["measured"]["preactivation"] - got["measured"]["none"] - 2 * rows * n * size < 256
    assert 0 <= got["measured"]["all"] - got["measured"]["preactivation"] - rows * n * size < 256
    assert got["planned"]["conventional"] == rows * (2 * d + 3 * n) * size + rows * 8


def test_the_eager_loop_keeps_more_than_the_conventional_way():
    config = dataclasses.replace(SMALL, batch_size=5)
    got = kept.compare(config, LanguageModel(config), torch.device("cpu"))
    assert got["measured"]["eager loop"] > got["planned"]["conventional"]


def test_token_rounding_is_for_training_only():
    small = dataclasses.replace(SMALL, experts_backend="moestro")
    model = LanguageModel(dataclasses.replace(small, round_to=8))
    batch = torch.randint(0, small.vocab_size, (small.batch_size, small.seq_len + 1))
    model.loss(batch)
    layers = model.moe_layers
    assert all(layer.counts.remainder(8).eq(0).all() for layer in layers)
    assert sum(layer.rounded_pairs for layer in layers) > 0
    loss = model.eval().loss(batch)
    assert all(layer.rounded_pairs == 0 for layer in layers)
    plain = LanguageModel(small)
    assert torch.equal(plain.loss(batch), loss)
    for wrong, sentence in (
        ({"round_to": 24}, "a power of two"),
        ({"round_to": 8, "experts_backend": "eager"}, "expected 0"),
    ):
        with pytest.raises(TrainError, match=f"--round-to: .*{sentence}"):
            settings.check(dataclasses.replace(small, **wrong))


def test_a_window_of_metrics_survives_its_state():
    window = metrics.Window(2, 3, torch.device("cpu"))
    counts = torch.tensor([[1, 2, 3], [6, 0, 0]])
    values = [torch.tensor(float(i)) for i in range(4)]
    window.add(*values, counts, torch.tensor(3))
    other = metrics.Window(2, 3, torch.device("cpu"))
    other.restore(window.state())
    for each in (window, other):
        each.add(*(2 * value for value in values), counts, torch.tensor(4))
    row = window.take()
    assert row == other.take()
    assert (row["loss"], row["grad_norm"]) == (0.0, 4.5) and row["expert_load"] == [[2, 4, 6], [12, 0, 0]]
    assert metrics.worst_load(row["expert_load"]) == 3.0 and window.steps == 0


def test_a_row_cut_by_a_kill_is_left_out(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"kind": "train", "step": 1}\n{"kind": "train", "st')
    assert metrics.read_metrics(path) == [{"kind": "train", "step": 1}]
    path.write_text('{"kind": "tra\n{"kind": "train", "step": 1}\n')
    with pytest.raises(TrainError, match="line 1 is not JSON"):
        metrics.read_metrics(path)


def test_both_backends_start_from_the_same_weights():
    models = [
        LanguageModel(dataclasses.replace(SMALL, experts_backend=backend)) for backend in ("moestro", "eager")
    ]
    states = [model.state_dict() for model in models]
    assert states[0].keys() == states[1].keys()
    for name, value in states[0].items():
        assert torch.equal(value, states[1][name]), name
    assert models[0].embedding.weight.std().item() == pytest.approx(0.02, rel=0.1)


def test_the_heat_map_sums_the_rows_of_a_group():
    rows = [
        {"step": i + 1, "expert_load": [[3, 1], counts]} for i, counts in enumerate([[1, 3], [3, 1], [0, 0]])
    ]
    assert report._relative_load([rows[:2], rows[2:]], 1) == [[1.0, 0.0], [1.0, 0.0]]
    assert report._relative_load([rows[:2]], 0) == [[1.5], [0.5]]
    assert report._deviation([3, 1]) == 0.5 and report._deviation([2, 2]) == report._deviation([0, 0]) == 0
