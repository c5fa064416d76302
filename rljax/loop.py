"""The training loop: sample, judge, update, publish, save, log; and continue exactly where a killed run stopped.

Owns the order of a run's stages. Refuses to own the stages themselves.

    prompts -> collect (sample and judge) -> advantages -> pack -> score -> update x n -> publish -> log, save
       ^                                                                            |
       +------------------------ version + n, position + tasks ---------------------+

State between two batches is (parameters or an adapter of them, optimizer, a reference and its weight where they move, a
critic where there is one, step, position in the prompt stream); with the seed it decides everything that follows, so a
checkpoint of exactly that continues bit for bit.
"""

import hashlib
import json
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from rljax.checkpoint import CheckpointStore, load_files, load_params, save_params
from rljax.config import Config
from rljax.conversion.adapter import AdapterCard, base_identity, check_adapter, write_adapter
from rljax.convert import read_arch, read_checkpoint
from rljax.cpu import multiplies_bfloat16
from rljax.data.prompts import PromptStream, TaskSource, check_fingerprint
from rljax.data.tokenizer import Tokenizer
from rljax.envs.base import parse_options
from rljax.evaluate import run_eval
from rljax.faults import fault_point
from rljax.learner.critic import Critic
from rljax.learner.state import TrainState
from rljax.learner.step import DeviceBatch, Learner
from rljax.manifest import MANIFEST
from rljax.memory import estimate, give_back_freed
from rljax.mesh import build_mesh, data_shards, on_cpu
from rljax.models.quantized import num_bytes
from rljax.pytree import Params
from rljax.records import Group, RunMeta
from rljax.rollouts.batching import Prepared, batch_shape, needs_logprobs, prepare, revise
from rljax.rollouts.collector import Job, Stopped
from rljax.rollouts.refill import Collected, NothingToLearn, fill_batch
from rljax.rollouts.sampling import params_in_use, train_params
from rljax.rollouts.stack import Stack, build_engine, open_stack
from rljax.rollouts.statistics import critic_metrics, rollout_metrics, update_metrics
from rljax.rollouts.tasks import fitting_tasks
from rljax.run_dir import RunDir
from rljax.sampler.engine import Engine
from rljax.signals import StopRequest, stop_requests
from rljax.telemetry.live import LiveView
from rljax.telemetry.profile import Clock
from rljax.telemetry.sinks import MetricsFile, RolloutLog, Sink, Sinks, TensorBoardSink, read_metrics

_log = logging.getLogger(__name__)

_LONG_COMPILATION = 0.5  # seconds


@dataclass(frozen=True, slots=True)
class _Scored:
    """The mini-batches of one batch of rollouts on the mesh, with what was scored before their first update."""

    prepared: Prepared
    batches: list[DeviceBatch]
    proximal: list[Any]
    references: list[Any]
    values: list[Any]  # of the critic; empty without one


@dataclass(frozen=True, slots=True)
class TrainResult:
    """How a run, or a part of it, ended.

    Example:
        TrainResult(run_dir=Path("runs/arithmetic"), step=100, trained=40, stopped=False, metrics={"reward/mean": 0.8})
    """

    run_dir: Path
    """Where everything was written."""
    step: int
    """Optimizer steps done in all."""
    trained: int
    """Optimizer steps done by this call."""
    stopped: bool
    """Whether it was asked to stop before the end; the same call continues it."""
    metrics: dict[str, float]
    """The last step's metrics; empty when nothing was trained."""


def train(config: Config, report: Callable[[str], None] = lambda text: None) -> TrainResult:
    """Train as the configuration says, from the newest checkpoint of its run directory if there is one.

    Args:
        config: The run.
        report: Receives a sentence about each phase of the start.

    Raises:
        ValueError: the configuration does not fit the model, the tasks, the devices or the run that is being resumed.
        StorageError: a checkpoint could not be written, or none of those there is good.
        EnvironmentFailure: too many rollouts could not be scored.
        NothingToLearn: dynamic sampling found too few groups with different rewards; the run is saved.
    """
    clock = Clock()
    with stop_requests() as stop, ExitStack() as opened, _compile_time(clock) as compiled:
        with clock.bucket("restart"):
            run = _Run(config, clock, stop, opened, compiled, report)
        try:
            run.go()
        except Stopped:
            _log.info("stopped while collecting rollouts; they will be collected again")
        except NothingToLearn:
            run.save()
            raise
        if not stop():
            with clock.bucket("checkpoint"):
                run.export()
        else:
            run.save()
        return TrainResult(config.run.dir, run.meta.step, run.trained, stop(), run.last)


def check(config: Config, report: Callable[[str], None] = lambda text: None) -> None:
    """Check everything a run needs short of compiling, loading weights and starting workers: `--dry-run`.

    What is in the run directory is not looked at, and nothing is written there.

    Raises:
        ValueError: what `train` would raise for.
    """
    parse_options(config.env.name, config.env.options)
    mesh = build_mesh(config.mesh)
    arch = read_arch(config.model.checkpoint)
    tokenizer = Tokenizer.load(config.model.checkpoint)
    tasks = fitting_tasks(config, "train", tokenizer, report)
    if config.eval.every:
        fitting_tasks(config, "eval", tokenizer, report)
    learner = Learner(arch, mesh, config)
    _check_first_adapter(config, learner)
    engine = build_engine(config, arch, mesh, tokenizer)
    shape = batch_shape(config, data_shards(mesh))
    report(f"algorithm: {config.algorithm.describe()}")
    if learner.lora is not None:
        trained, frozen = (
            sum(leaf.size for leaf in jax.tree.leaves(tree)) for tree in (learner.abstract_state.params, learner.abstract_model)
        )
        size = num_bytes(learner.abstract_base) / 1e6
        report(
            f"adapter: {trained:,} parameters beside {frozen:,} in {size:,.1f} MB ({config.lora.base_dtype}), "
            f"scale {learner.lora.scale:g}, {' '.join(learner.lora.targets)}"
        )
    report(f"mesh: {dict(mesh.shape)} on {mesh.devices.flat[0].device_kind}")
    report(f"batch: up to {shape.micro_batches} micro-batches of {shape.rows} rows of {shape.length} tokens")
    _report_needs(config, learner, engine, report)
    report(f"epochs: {config.train.steps / config.updates_per_batch * config.train.rollout_batch_size / len(tasks):.2f}")


def _report_needs(config: Config, learner: Learner, engine: Engine, report: Callable[[str], None]) -> None:
    report(f"attention in decode steps: {engine.attention}")
    types = (config.model.compute_dtype, config.sampler.dtype)
    if "bfloat16" in types and on_cpu(learner.mesh) and multiplies_bfloat16() is False:
        report(
            "bfloat16: this CPU has no products of that type, and converts; on it "
            "`model.compute_dtype=float32 sampler.dtype=float32` is faster"
        )
    for line in estimate(config, learner, engine).lines():
        report(line)


class _Run:
    """An open run: its parts, its state and its position."""

    def __init__(
        self,
        config: Config,
        clock: Clock,
        stop: StopRequest,
        opened: ExitStack,
        compiled: list[float],
        report: Callable[[str], None],
    ) -> None:
        self.config, self.clock, self.stop, self.compiled = config, clock, stop, compiled
        self.dir = RunDir(config.run.dir)
        self.trained, self.last = 0, {}
        self.store = opened.enter_context(CheckpointStore(self.dir.checkpoints, config.checkpoint.keep))
        self._refuse_another_run()
        arch, began = read_arch(config.model.checkpoint), self.dir.began()
        self.stack: Stack = opened.enter_context(
            open_stack(config, arch, config.model.checkpoint, clock, stop, began, self.dir.logs)
        )
        self.tasks = fitting_tasks(config, "train", self.stack.tokenizer, report)
        self.stream = PromptStream(self.tasks, config.run.seed, config.data.shuffle)
        self.eval_tasks: TaskSource = fitting_tasks(config, "eval", self.stack.tokenizer, report) if config.eval.every else ()
        self.learner = Learner(arch, self.stack.mesh, config)
        _check_first_adapter(config, self.learner)
        self.critic = Critic(self.learner) if config.algorithm.advantage == "gae" else None
        self.shape = batch_shape(config, data_shards(self.stack.mesh), self.learner.replayed)
        _report_needs(config, self.learner, self.stack.engine, report)
        self.state, self.meta = self._first_state(report)
        self.base = None if self.learner.lora is None else self._load_base()
        self.reference = self._fixed_reference()
        self.dir.record_launch(config, [str(device) for device in self.stack.mesh.devices.flat], began)
        self.rollout_log = RolloutLog(self.dir.rollouts) if config.telemetry.rollouts else None
        self.sinks = opened.enter_context(self._open_sinks())
        self._saved = self.meta.step

    def go(self) -> None:
        """Train until the last step, or until asked to stop."""
        self._publish()
        if self.config.sampler.warm_up:
            with self.clock.bucket("sampling"):
                self.stack.engine.warm_up(params_in_use(self.config))
        self._evaluate()
        while self.meta.step < self.config.train.steps and not self.stop():
            self._one_batch()

    def save(self) -> None:
        """Save the state as it is, unless it has been saved, and wait until it is on disk."""
        with self.clock.bucket("checkpoint"):
            if self._saved < self.meta.step:
                self.store.save(self.meta.step, self.state, self.meta)
                self._saved = self.meta.step
            self.store.wait()

    def export(self) -> None:
        """Save, and write the trained model as a checkpoint that `eval`, `sample` and `convert` take."""
        self.save()
        # Also when nothing was trained: a run killed between its last checkpoint and here has an older model or none.
        params, files = self.state.params, load_files(self.config.model.checkpoint)
        if self.base is not None:
            assert self.learner.lora is not None, "a base is there for its adapter"
            card = AdapterCard(self.learner.lora, base_identity(self.config.model.checkpoint))
            write_adapter(self.dir.adapter, params, card, overwrite=True)
            params = self.learner.merged(params, self.base)
        save_params(self.dir.model, params, files, overwrite=True)

    def _refuse_another_run(self) -> None:
        """Refuse a used directory if the configuration says so, and one whose run was configured otherwise."""
        newest = self.store.latest()
        if self.config.checkpoint.resume == "never" and (newest is not None or self.dir.launches.exists()):
            found = "no checkpoint yet" if newest is None else f"its newest checkpoint is of step {newest}"
            raise ValueError(
                f"{self.dir.path} holds a run ({found}) and checkpoint.resume is 'never'; choose another run.dir, or set "
                "checkpoint.resume = 'auto' to continue it"
            )
        if newest is not None and (changes := self.dir.differences(self.config)):
            raise ValueError(_changed(self.dir.path, "; ".join(changes)))

    def _load(self, change: Callable[[str, jax.Array], Any] | None = None) -> Params:
        """Load the model of the configuration onto the learner's layout."""
        layout, model = jax.tree.map(lambda leaf: leaf.sharding, self.learner.abstract_model), self.config.model
        return read_checkpoint(model.checkpoint, lambda arch, shapes: layout, model.param_dtype, change).params

    def _load_base(self) -> Params:
        """Load the model that an adapter belongs to, and quantise it weight by weight if it is to be kept so."""
        kept = None if self.config.lora.base_dtype == "as-is" else self.learner.kept
        return self._load(kept)

    def _first_params(self) -> Params:
        """Return what is trained as it is before the first step: the model, or a new or a given adapter of it."""
        if self.learner.lora is None:
            return self._load()
        given = self.config.lora.adapter
        return self.learner.first_adapter() if given is None else load_params(given, self.learner.abstract_state.params)

    def _fixed_reference(self) -> Params | None:
        """Return the initial policy where it is the reference; None where there is none, it moves, or it is the base alone."""
        algorithm, lora = self.config.algorithm, self.config.lora
        fixed = algorithm.beta > 0 and not algorithm.reference_sync_steps
        return self._first_params() if fixed and (not lora.rank or lora.adapter is not None) else None

    def _first_state(self, report: Callable[[str], None]) -> tuple[TrainState, RunMeta]:
        """Return the newest checkpoint's state, or the initial one."""
        restored = self.store.restore(self.learner.abstract_state)
        config_hash, fingerprint = _identity(self.config), self.stream.fingerprint
        if restored is None:
            report(f"start: {self.config.model.checkpoint}")
            meta = RunMeta(0, 0, self.config.run.seed, 0, config_hash, fingerprint)
            return self.learner.init(self._first_params()), meta
        meta = restored.meta
        if meta.config_hash != config_hash:
            raise ValueError(_changed(self.dir.path, "the model in model.checkpoint or lora.adapter, or rljax itself"))
        check_fingerprint(meta.dataset_fingerprint, fingerprint)
        steps = self.config.train.steps
        if meta.step > steps:
            raise ValueError(
                f"train.steps is {steps}, but {self.dir.path} has been trained for {meta.step} steps: nothing would be "
                f"trained. Raise train.steps above {meta.step}, or choose another run.dir"
            )
        if meta.step == steps:
            report(f"resume: {self.dir.path} is complete ({steps} steps); raise train.steps to train on")
        else:
            report(f"resume: step {meta.step} of {self.dir.path}")
        return restored.arrays, meta

    def _open_sinks(self) -> Sinks:
        """Open the sinks, without what a killed run logged after the checkpoint."""
        telemetry, step = self.config.telemetry, self.meta.step
        metrics = MetricsFile(self.dir.metrics)
        metrics.truncate_after(step)
        if self.rollout_log is not None:
            self.rollout_log.truncate_after(step)
        sinks: list[Sink] = [metrics]
        if telemetry.tensorboard:
            sinks.append(TensorBoardSink(self.dir.tensorboard, step + 1))
        sinks.append(LiveView(self.config.train.steps, telemetry.live, lambda: self.clock.phase))
        return Sinks(*sinks)

    def _publish(self) -> None:
        with self.clock.bucket("publish"):
            params = self.stack.publish(self.state.params, self.base)
            self.stack.engine.set_weights(jax.block_until_ready(params), self.meta.version)

    def _one_batch(self) -> None:
        """Collect one batch of rollouts and make its optimizer steps."""
        collected = self._collect()
        fault_point("loop.collected")
        with self.clock.bucket("scoring"):
            scored = self._score(collected.kept)
        extra: dict[str, Any] = rollout_metrics(collected.sampled, self.config) | self.stack.engine.take_metrics()
        for _ in range(self.config.algorithm.num_iterations):
            for index in range(len(scored.batches)):
                values = self._update(scored, index)
                last = self.meta.step % self.config.updates_per_batch == 0
                if last:
                    position = self.meta.prompt_position + collected.tasks
                    self.meta = replace(self.meta, prompt_position=position)
                    self._publish()
                self._log(values | extra)
                extra = {}
        self._save_if_due()
        self._evaluate()

    def _score(self, groups: Sequence[Group]) -> _Scored:
        """Pack groups and score them: under the reference and the proximal policy and by the critic, where these are needed."""
        prepared = prepare(groups, self.config, self.shape)
        batches = [self.learner.put(batch) for batch in prepared.batches]
        reference, compared = self.state.reference or self.reference, self.config.algorithm.beta > 0
        references = [self.learner.score(reference, batch.unrouted(), self.base) if compared else None for batch in batches]
        # With one update per batch the proximal policy is the current one, and needs no scoring.
        needed = self.config.updates_per_batch > 1 or needs_logprobs(self.config)
        proximal = [self.learner.score(self.state.params, batch, self.base) if needed else None for batch in batches]
        values = []
        if self.critic is not None and self.state.critic is not None:
            values = [self.critic.values(self.state.critic.params, batch) for batch in batches]
        if needs_logprobs(self.config) or values:
            ours, theirs, expected = jax.device_get((proximal, references, values))
            known = (ours if needed else None, theirs if compared else None, expected or None)
            prepared = revise(prepared, groups, self.config, *known, self._beta())
            batches = [self.learner.put(batch) for batch in prepared.batches]
        return _Scored(prepared, batches, proximal, references, values)

    def _beta(self) -> float:
        """Return the weight of the divergence at the next step."""
        return self.config.algorithm.beta if self.state.beta is None else float(jax.device_get(self.state.beta))

    def _collect(self) -> Collected:
        algorithm, position = self.config.algorithm, self.meta.prompt_position

        def sample(taken: int, count: int) -> list[Group]:
            tasks = self.stream.take(position + taken, count)
            epochs = [self.stream.epoch_of(position + taken + index) for index in range(count)]
            jobs = [Job(task, epoch * algorithm.num_generations) for task, epoch in zip(tasks, epochs, strict=True)]
            return self.stack.collector.collect(jobs, algorithm.num_generations, "train", train_params(self.config))

        fault_point("loop.collecting")
        collected = fill_batch(sample, self.config)
        if self.rollout_log is not None:
            self.rollout_log.write(self.meta.step + 1, collected.sampled)
        return collected

    def _update(self, scored: _Scored, index: int) -> dict[str, float]:
        """Make one optimizer step, of the critic too if there is one, and return its metrics."""
        values: dict[str, float] = {"gap/rejected_fraction": scored.prepared.rejected_fraction}
        with self.clock.bucket("update"):
            if self.critic is not None:
                values |= self._update_critic(self.critic, scored, index)
            if self.meta.step >= self.config.algorithm.critic_warmup_steps:
                values |= self._update_policy(scored, index)
            fault_point("loop.updating")
        self.trained += 1
        self.meta = replace(self.meta, step=self.meta.step + 1, version=self.meta.version + 1)
        return values

    def _update_policy(self, scored: _Scored, index: int) -> dict[str, float]:
        batch, proximal, beta = scored.batches[index], scored.proximal[index], self._beta()
        self.state, output = self.learner.step(self.state, batch, proximal, scored.references[index], self.base)
        sums, router = jax.device_get((output.metrics, output.router))
        grad_norm, learning_rate = jax.device_get((output.grad_norm, output.learning_rate))
        logp = np.asarray(jax.device_get(output.logp if proximal is None else proximal))
        values = update_metrics(scored.prepared.batches[index], sums, logp) | {"loss/beta": beta}
        values |= {f"router/{name}": float(value) for name, value in router.items()}
        return values | {"optimizer/grad_norm": float(grad_norm), "optimizer/learning_rate": float(learning_rate)}

    def _update_critic(self, critic: Critic, scored: _Scored, index: int) -> dict[str, float]:
        assert self.state.critic is not None
        expected, returns = scored.values[index], scored.prepared.returns[index]
        state, output = critic.step(self.state.critic, scored.batches[index], expected, critic.put(returns))
        self.state = replace(self.state, critic=state)
        sums, grad_norm, before = jax.device_get((output.metrics, output.grad_norm, expected))
        values = critic_metrics(scored.prepared.batches[index], np.asarray(before), returns, sums)
        return values | {"critic/grad_norm": float(grad_norm)}

    def _log(self, values: dict[str, float]) -> None:
        """Add progress and times to a step's metrics and write them."""
        meta, seconds = self.meta, self.clock.take()
        step_seconds = sum(seconds.values())
        values |= {
            "progress/step": meta.step,
            "progress/version": meta.version,
            "progress/prompt_position": meta.prompt_position,
        }
        values |= {"time/step": step_seconds, **{f"time/{bucket}": spent for bucket, spent in seconds.items()}}
        if "tokens/trained" in values:  # all but the steps that train the critic alone
            values["throughput/trained_tokens_per_s"] = values["tokens/trained"] / step_seconds
        if "tokens/generated" in values and seconds["sampling"] > 0:
            values["throughput/generated_tokens_per_s"] = values["tokens/generated"] / seconds["sampling"]
        values["compile/programs"] = len(self.compiled)
        self.compiled.clear()
        self.last = values
        self.sinks.write(meta.step, values)
        norms = [values.get(name, 0.0) for name in ("optimizer/grad_norm", "critic/grad_norm")]
        if not np.isfinite(norms).all():
            raise FloatingPointError(f"the gradient of step {meta.step} is not finite; the last checkpoint is from before it")

    def _save_if_due(self) -> None:
        with self.clock.bucket("checkpoint"):
            self.store.check()
            due = self.meta.step % self.config.checkpoint.every == 0 or self.meta.step == self.config.train.steps
            if due:
                fault_point("loop.saving")
                self.store.save(self.meta.step, self.state, self.meta)
                self._saved = self.meta.step

    def _evaluate(self) -> None:
        """Evaluate if it is due at this step and has not been done: a run may have been stopped in the middle of it."""
        every, step = self.config.eval.every, self.meta.step
        if not every or step % every or "eval/accuracy" in read_metrics(self.dir.metrics).get(step, {}):
            return
        result = run_eval(self.stack.collector, self.eval_tasks, self.config)
        self.stack.engine.take_metrics()  # of the evaluation: no step's
        self.sinks.write(step, {"eval/accuracy": result.accuracy, "eval/reward_mean": result.reward_mean})


def _check_first_adapter(config: Config, learner: Learner) -> None:
    """Refuse an adapter to begin with that does not fit the configuration and its model."""
    if learner.lora is not None and config.lora.adapter is not None:
        check_adapter(config.lora.adapter, learner.lora, config.model.checkpoint)


def _changed(directory: Path, what: str) -> str:
    return (
        f"{directory} was trained under another configuration, and continuing would mix the two: {what}. "
        "Change this back, or choose another run.dir"
    )


def _identity(config: Config) -> str:
    """Hash what must stay the same between restarts: the options that decide, the architecture and the tokenizer.

    With a reference policy or an adapter, for which the initial checkpoint is loaded at every start, also the content of
    that; the same for an adapter to begin with.
    """
    files = sorted(load_files(config.model.checkpoint).items())
    if config.algorithm.beta > 0 or config.lora.rank:
        files.append((MANIFEST, (config.model.checkpoint / MANIFEST).read_bytes()))
    if config.lora.adapter is not None:
        files.append((f"adapter/{MANIFEST}", (config.lora.adapter / MANIFEST).read_bytes()))
    digests = [(name, hashlib.sha256(content).hexdigest()) for name, content in files]
    return hashlib.sha256(json.dumps([config.hash(), digests]).encode()).hexdigest()


@contextmanager
def _compile_time(clock: Clock) -> Iterator[list[float]]:
    """Count what compiling takes to its own bucket, wherever it happens; yield the list of the times so far (seconds)."""
    compiled: list[float] = []

    def listen(event: str, duration_secs: float, **_: str | int) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            clock.reassign(duration_secs, "compile")
            compiled.append(duration_secs)
            if duration_secs > _LONG_COMPILATION:  # before what was compiled runs, and takes memory itself
                give_back_freed()

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield compiled
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
