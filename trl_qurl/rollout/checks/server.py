"""Whether a server can serve a run: its workers, its cache, and the checkpoint it started from."""

from typing import TYPE_CHECKING

from trl_qurl.quantization.checks.kv_cache import check_kv_cache
from trl_qurl.quantization.checks.served import fingerprint
from trl_qurl.quantization.formats import SCHEMES
from trl_qurl.rollout.errors import ServerError

if TYPE_CHECKING:
    from trl_qurl.rollout.engine.served import ServedEngine


def check_server(server: "ServedEngine") -> None:
    """Raise `ValueError` if a server cannot load this run's weights."""
    try:
        description = server.describe()
    except ServerError as error:
        if error.status != 404 and "not implemented" not in str(error):
            raise
        raise ValueError(
            f"The vLLM server at {server.base_url} cannot load weights: it runs without trl-qurl's "
            f"worker extension or vLLM's development endpoints. Restart it with {server.command()}."
        ) from None
    check_kv_cache(
        description.kv_cache_dtype,
        f"--kv-cache-dtype of the vLLM server at {server.base_url}",
    )
    clause = difference(server)
    if clause:
        raise ValueError(
            f"The vLLM server at {server.base_url} does not serve {server.model!r} as "
            f"rollout_quantization={server.plan.formats!r} sends it: {clause}. Restart it with "
            f"{server.command()} (and the same --ignore), or change rollout_quantization or "
            "quantization_ignore."
        )


def difference(server: "ServedEngine") -> str:
    """Say in a clause how the server's starting checkpoint differs from this run's."""
    here = fingerprint(server.plan.schemes, server.shapes)
    there = server.call_workers("starting_fingerprint")[0]
    names = {name for name in here.keys() | there.keys() if here.get(name) != there.get(name)}
    if not names:
        return ""
    of_quantized_layers = {name for name in names if name.endswith(".weight_scale")}
    name = min(of_quantized_layers or names)
    both = f"{here.get(name, 'none')} here and {there.get(name, 'none')} there"
    for scheme in SCHEMES.values():
        both = both.replace(scheme.served_as, scheme.name)
    return (
        f"other formats, layers or another model: {len(names)} tensors differ, first {name} "
        f"({both})"
    )
