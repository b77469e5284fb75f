"""Parameters that training does not change, so that an engine which has them need not receive them again."""

from torch import nn

from trl_qurl.quantization.checkpoint_form import parameter_name


def frozen_parameters(model: nn.Module) -> frozenset[str]:
    """Names of the parameters that training does not change, of a model or a PEFT model.

    An engine fuses neighboring linear layers into one (query, key and value; gate and up), which it loads as a whole.
    So a linear layer counts as frozen only if all linear layers beside it are, and any other module only if all of its
    own parameters are. Layers that an adapter is merged into are not frozen.
    """
    modules = dict(model.named_modules())
    groups: dict[str, str] = {}  # of each parameter, by name
    changing = set()
    for path, module in modules.items():
        if any(base.__name__ == "BaseTunerLayer" for base in type(module).__mro__):  # PEFT's, without importing it
            changing |= {_group(path, False), _group(path, True)}
    for name, parameter in model.named_parameters():  # a shared one comes once, as it is sent
        path = name.rpartition(".")[0]
        if ".original_module" in path:
            continue  # PEFT trains a copy of it
        groups[parameter_name(name)] = group = _group(path, isinstance(modules[path], nn.Linear))
        if parameter.requires_grad:
            changing.add(group)
    return frozenset(name for name, group in groups.items() if group not in changing)


def _group(path: str, is_linear: bool) -> str:
    """A name for the modules that change together with this one."""
    name = parameter_name(path)
    return f"{name.rpartition('.')[0]}/linear" if is_linear else name
