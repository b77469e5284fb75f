"""Settings of the benchmarks that run during training."""

from dataclasses import dataclass, field

from trl_qurl.config.checks import check_choice

ANSWERED_BY = ("actor", "policy")


@dataclass
class TaskEvaluationSettings:
    r"""
    Benchmarks with checkable answers, answered greedily before the first optimizer step and after every so many.

    Args:
        eval_tasks (`list[str]`, *optional*, defaults to `[]`):
            Benchmarks as for `trl-qurl eval`: `gsm8k`, `math500`, ..., a local file, `name=source`.
        eval_tasks_steps (`int`, *optional*, defaults to `100`):
            Optimizer steps between evaluations. A multiple of the updates per rollout needs no sync of its own.
        eval_tasks_limit (`int` or `None`, *optional*):
            Only the first so many questions of each.
        eval_tasks_by (`str`, *optional*, defaults to `"actor"`):
            Who answers: `"actor"`, the quantized copy in the engine, which is fast and tells of itself; or `"policy"`,
            the model in training, generating without vLLM, which is slow and what counts.

    Raises:
        ValueError: Numbers that are not positive, or another answerer.
    """

    eval_tasks: list[str] = field(
        default_factory=list, metadata={"help": "Benchmarks to answer during training: names, files or name=source."}
    )
    eval_tasks_steps: int = field(default=100, metadata={"help": "Optimizer steps between these evaluations."})
    eval_tasks_limit: int | None = field(
        default=None, metadata={"help": "Only the first so many questions of each benchmark."}
    )
    eval_tasks_by: str = field(
        default="actor", metadata={"help": "Who answers: 'actor' (the engine, fast) or 'policy' (exact, slow)."}
    )

    def check_task_evaluation(self) -> None:
        """Refuse what cannot work.

        Raises:
            ValueError: As the class says.
        """
        if isinstance(self.eval_tasks, str):  # one of them, or several with commas
            self.eval_tasks = [name for name in self.eval_tasks.split(",") if name]
        if self.eval_tasks_steps < 1:
            raise ValueError(f"eval_tasks_steps is {self.eval_tasks_steps}: give a positive number of steps.")
        if self.eval_tasks_limit is not None and self.eval_tasks_limit < 1:
            raise ValueError(f"eval_tasks_limit is {self.eval_tasks_limit}: give a positive number, or None for all.")
        check_choice("eval_tasks_by", self.eval_tasks_by, ANSWERED_BY)
