"""Whether a model or a data set is on this machine or on the Hub, and whether it is complete.

Nothing else is imported: commands ask before slow imports.
"""

from pathlib import Path


def is_local(name: str) -> bool:
    """Return whether the name of a model or a data set is a path here, and not one on the Hub.

    Nothing expands `~`, as in transformers: a shell does, unless it is quoted.
    """
    return name.startswith((".", "/", "~")) or name.count("/") > 1 or Path(name).exists()


def check_model_directory(path: str | Path, instead_of_adapter: str) -> None:
    """Raise `FileNotFoundError` for a directory without a complete model.

    Libraries would look for the model on the Hub. If the directory holds an adapter, the message
    says `instead_of_adapter` what to do.
    """
    if Path(path, "config.json").is_file():
        return
    if Path(path, "adapter_config.json").is_file():
        raise FileNotFoundError(f"{path} holds an adapter, and no model: {instead_of_adapter}.")
    raise FileNotFoundError(
        f"{path} does not contain a model: give a directory with a config.json (~ is not "
        "expanded), or a name on the Hub such as Qwen/Qwen2.5-0.5B-Instruct."
    )
