"""TRL's own losses and configs on quantized rollouts: real runs, and a GRPOConfig where ours is
asked for.
"""

import pytest
import yaml

RUNS = yaml.safe_load("""
GSPO:
  objective: trl
  importance_sampling_level: sequence
CISPO, one update:
  objective: trl
  loss_type: cispo
  steps_per_generation: 1
  max_steps: 2
no correction:
  objective: trl
  vllm_importance_sampling_correction: false
  loss_type: sapo
  sapo_temperature_neg: 1.2
  sapo_temperature_pos: 0.9
VESPO:
  loss_type: vespo
  vllm_importance_sampling_mode: token_truncate
  vespo_k_pos: 2.5
  vespo_lambda_pos: 2.5
  vespo_k_neg: 2.5
  vespo_lambda_neg: 1.5
  max_steps: 2
""")


@pytest.fixture(scope="module")
def histories(train, tmp_path_factory):
    directory = tmp_path_factory.mktemp("runs")
    records = train(*([directory / "out", settings] for settings in RUNS.values()))
    return {name: record["history"] for name, record in zip(RUNS, records, strict=True)}


@pytest.mark.vllm
@pytest.mark.parametrize("name", RUNS)
def test_a_real_run_learns_and_measures_the_mismatch(name, histories):
    steps = [row for row in histories[name] if "grad_norm" in row]
    assert len(steps) == RUNS[name].get("max_steps", 4)
    assert all(row["grad_norm"] > 0 for row in steps)
    measured = [row["mismatch/kl_k3"] for row in histories[name] if "mismatch/kl_k3" in row]
    assert measured
    assert all(0 < kl < 0.1 for kl in measured)
