"""What autocast makes of the weights is what is quantized: engine
and trainer have the same policy.
"""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tiny import save_tiny, stream_of, tiny_model
from transformers import AutoModelForCausalLM

from trl_qurl.quantization import SCHEMES
from trl_qurl.quantization.merging import model_parameters, on_grid
from trl_qurl.quantization.storage import read_tensors
from trl_qurl.rollout.preparation import round_frozen_base

pytestmark = [pytest.mark.vllm, pytest.mark.xdist_group("colocated")]


@pytest.fixture(scope="module")
def runs(train, tmp_path_factory):
    """From weights that bfloat16 holds exactly, as most checkpoints are; each update is far below
    its spacing.
    """
    directory = tmp_path_factory.mktemp("autocast")
    save_tiny(directory / "model", family="llama", dtype=torch.bfloat16)
    config = {
        "learning_rate": 1e-6,
        "bf16": True,
        "uaq_scale": 1.0,
        "model_init_kwargs": {"dtype": "float32"},
        "sync_check_interval": 1,
        "save_steps": 2,
        "save_strategy": "steps",
    }
    policy = ["--model", directory / "model", "--save"]
    runs = {
        "autocast": [*policy, config],
        "none": [*policy, config | {"bf16": False}],
        "adapter": [*policy, "--lora", config],
        "adapter on a float32 model": ["--lora", config | {"model_init_kwargs": None}],
    }
    commands = [[directory / name, *given] for name, given in runs.items()]
    records = train(*commands)
    return dict(zip(runs, records, strict=True)) | {"directory": directory}


def test_weights_are_sent_as_the_policy_computes_with_them(runs):
    share = {name: runs[name]["on_the_grid_of_bf16"] for name in ("autocast", "none", "adapter")}
    assert share["autocast"] == 1.0, "an update that autocast rounds away reached the engine"
    assert share["none"] < 0.2
    assert share["adapter"] < 0.2
    assert runs["adapter on a float32 model"]["base_on_the_grid_of_bf16"]


@pytest.mark.parametrize("name, dtype", [("autocast", torch.bfloat16), ("none", torch.float32)])
def test_a_saved_policy_is_loaded_as_it_was_trained(name, dtype, runs):
    saved = runs["directory"] / name
    for path in (saved, saved / "checkpoint-2"):
        stored = dict(read_tensors(path))
        policy = AutoModelForCausalLM.from_pretrained(path)
        weights = {name: p for name, p in policy.named_parameters() if p.dim() > 1}
        for name, p in weights.items():
            assert stored[name].dtype == torch.float32, "nothing is lost"
            assert torch.equal(p, stored[name].to(dtype)), name


def test_only_float32_matrices_are_rounded():
    matrix = torch.tensor([[1.0 + 2.0**-12]])
    bias = torch.tensor([1.0 + 2.0**-12])
    rounded = on_grid(matrix, torch.bfloat16)
    assert rounded.item() == 1.0
    assert rounded.dtype == torch.float32
    assert on_grid(bias, torch.bfloat16) is bias
    assert on_grid(matrix, None) is matrix
    assert on_grid(matrix.half(), torch.bfloat16).dtype == torch.float16


def test_only_frozen_matrices_of_the_policy_are_rounded():
    adapted = get_peft_model(tiny_model("llama"), LoraConfig(r=2, modules_to_save=["down_proj"]))
    adapted.add_adapter("not used", LoraConfig(r=2))
    before = {name: p.clone() for name, p in adapted.named_parameters()}
    round_frozen_base(adapted, torch.bfloat16)
    for name, p in adapted.named_parameters():
        is_policys = "original_module" not in name and "not used" not in name
        expected = before[name]
        if is_policys and not p.requires_grad and p.dim() > 1:
            expected = on_grid(expected, torch.bfloat16)
        assert p.dtype == torch.float32
        assert torch.equal(p, expected)
    copy = adapted.base_model.model.model.layers[1].mlp.down_proj.modules_to_save["default"].weight
    sent = dict(model_parameters(adapted, merges=True, grid=torch.bfloat16))[
        "model.layers.1.mlp.down_proj.weight"
    ]
    assert torch.equal(sent, on_grid(copy, torch.bfloat16)), (
        "it is trained whole, as without an adapter"
    )


@pytest.mark.parametrize("adapts", [False, True], ids=["whole", "adapter"])
def test_a_policy_of_mixed_types_runs_as_in_training(adapts):
    model = tiny_model("llama", dtype=torch.bfloat16)
    model.model.layers[1].input_layernorm.float()  # as preparations for training leave norms
    weights = stream_of(model, SCHEMES["int8"], smooths=True)
    weights.grid = torch.bfloat16
    policy = model
    if adapts:
        policy = get_peft_model(model, LoraConfig(r=2))
    weights.fit_smoothing(policy, [[40, 50, 60]])
    assert weights.smoothing.scales
