"""The command line: one verb per thing rljax does, each a thin call of the function of the same name.

Owns arguments, help, what is printed, and exit codes:

    0 done    2 configuration or arguments    70 internal error    74 storage    75 stopped or worth retrying
"""

import argparse
import json
import logging
import math
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rljax import __version__
from rljax.manifest import StorageError
from rljax.recipe import describe, load, load_with_sources, render
from rljax.records import Completion, SamplingParams

EXIT_DONE, EXIT_USAGE, EXIT_INTERNAL, EXIT_STORAGE, EXIT_RETRY, EXIT_INTERRUPTED = 0, 2, 70, 74, 75, 130

_TOP = """\
Reinforcement-learning post-training for language models in JAX.

  rljax convert SmolLM2.gguf checkpoints/smollm2     make a checkpoint of a GGUF file or a Hugging Face folder
  rljax sample checkpoints/smollm2                   talk to it
  rljax eval recipe.toml                             score it on held-out tasks
  rljax train recipe.toml                            train it; the same command resumes
  rljax convert runs/my-run/model exported --to hf   take the result elsewhere
"""

_TRAIN = """\
examples:
  rljax train recipe.toml
  rljax train recipe.toml train.steps=200 optimizer.learning_rate=5e-6     change options for this run
  rljax train recipe.toml --dry-run                                        check everything short of compiling

A run lives in its directory (run.dir). Stopped, killed or crashed, the same command continues it exactly; Ctrl-C saves
first, a second Ctrl-C does not. See every option with `rljax config --describe`.
"""

_EVAL = """\
examples:
  rljax eval recipe.toml                                   the checkpoint named in the recipe
  rljax eval recipe.toml --checkpoint runs/my-run/model    the trained model of a run
  rljax eval recipe.toml eval.num_tasks=1000 --json
"""

_SAMPLE = """\
examples:
  rljax sample checkpoints/smollm2                          a conversation in the terminal
  rljax sample runs/my-run/model --prompt "What is 3 + 4?"  one answer
  rljax sample checkpoints/smollm2 --temperature 0          always the most likely token
  rljax sample checkpoints/smollm2 --top-p 0.9              no unlikely tokens
  rljax sample checkpoints/smollm2 --prompt "Count." --stop ", 5" --n 3 --json
"""

_CONVERT = """\
examples:
  rljax convert SmolLM2.gguf checkpoints/smollm2            GGUF, dequantised
  rljax convert path/to/hf-folder checkpoints/llama         Hugging Face folder with safetensors
  rljax convert runs/my-run/model exported --to hf          back to the Hugging Face format
  rljax convert SmolLM2.gguf anywhere --dry-run             show the plan, write nothing
  rljax convert peft-adapter adapters/mine --base checkpoints/llama         an adapter of PEFT; back again without --base
  rljax convert adapters/mine merged --base checkpoints/llama --to hf       base and adapter in one
"""

_CONFIG = """\
examples:
  rljax config recipe.toml                          every option, and where its value comes from
  rljax config recipe.toml train.steps=5 --json     the resolved options for another program
  rljax config --describe                           what every option means
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    parser = _parser()
    args, rest = parser.parse_known_args(argv)
    # argparse takes all positional arguments from one place; overrides may also follow an option such as --dry-run.
    if not hasattr(args, "overrides") or not all("=" in word and not word.startswith("-") for word in rest):
        args = parser.parse_args(argv)
    elif rest:
        args.overrides += rest
    if args.command is None:
        parser.print_help()
        return EXIT_USAGE
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    try:
        return args.command(args)
    except KeyboardInterrupt:
        print("rljax: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except StorageError as error:
        return _fail(error, EXIT_STORAGE, args.traceback)
    except (ValueError, FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
        return _fail(error, EXIT_USAGE, args.traceback)
    except OSError as error:
        return _fail(error, EXIT_STORAGE, args.traceback)
    except Exception as error:
        if type(error).__name__ == "EnvironmentFailure":  # its class is only importable with jax
            return _fail(error, EXIT_RETRY, args.traceback)
        traceback.print_exc()
        print("rljax: internal error; please report it with the text above", file=sys.stderr)
        return EXIT_INTERNAL


def _fail(error: BaseException, code: int, with_traceback: bool) -> int:
    if with_traceback:
        traceback.print_exception(error)
    print(f"rljax: {error}", file=sys.stderr)
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("rljax", description=_TOP, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--version", action="version", version=f"rljax {__version__}")
    parser.set_defaults(command=None)
    verbs = parser.add_subparsers(title="commands", metavar="COMMAND")

    def verb(name: str, command: Callable[[argparse.Namespace], int], summary: str, epilog: str) -> argparse.ArgumentParser:
        made = verbs.add_parser(
            name, help=summary, description=summary, epilog=epilog, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        made.set_defaults(command=command)
        made.add_argument("--traceback", action="store_true", help="show where an error came from")
        return made

    def recipe(made: argparse.ArgumentParser) -> None:
        made.add_argument("recipe", nargs="?", help="TOML recipe; without one every option has its default")
        made.add_argument("overrides", nargs="*", metavar="section.option=value", help="change options of the recipe")

    train = verb("train", _train, "Train a model, or continue a run.", _TRAIN)
    recipe(train)
    train.add_argument("--dry-run", action="store_true", help="check everything short of compiling, and stop")

    evaluate = verb("eval", _eval, "Score a checkpoint on held-out tasks.", _EVAL)
    recipe(evaluate)
    evaluate.add_argument("--checkpoint", type=Path, help="checkpoint to score (default: model.checkpoint)")
    evaluate.add_argument("--json", action="store_true", help="print the result as one JSON line")

    sample = verb("sample", _sample, "Talk to a checkpoint in the terminal.", _SAMPLE)
    sample.add_argument("checkpoint", type=Path, help="checkpoint directory")
    sample.add_argument("--prompt", help="say this, print the answer and stop (`-` reads it from standard input)")
    sample.add_argument("--system", help="system message")
    sample.add_argument("--context", type=int, default=1024, help="longest conversation in tokens (default: 1024)")
    sample.add_argument("--seed", type=int, help="make the draws repeatable")
    _add_sampling(sample)

    convert = verb("convert", _convert, "Convert a model between formats, checked bit by bit.", _CONVERT)
    convert.add_argument("source", type=Path, help="a .gguf file, a Hugging Face folder, a checkpoint of rljax, or an adapter")
    convert.add_argument("target", type=Path, help="folder to create")
    convert.add_argument(
        "--to",
        choices=("orbax", "hf", "adapter", "peft"),
        help="target format (default: from others' to rljax's, from rljax's to others'); an adapter to orbax or hf is merged",
    )
    convert.add_argument("--base", type=Path, help="the model an adapter belongs to (default: the one it names)")
    convert.add_argument("--dtype", choices=("float32", "bfloat16"), help="type of the written parameters")
    convert.add_argument("--shard-size", type=int, metavar="BYTES", help="largest safetensors file, with --to hf")
    convert.add_argument("--overwrite", action="store_true", help="replace a model that is already there")
    convert.add_argument("--dry-run", action="store_true", help="show the plan, write nothing")
    convert.add_argument(
        "--verify",
        choices=("auto", "none", "bits", "logits"),
        default="auto",
        help="read back and compare every bit, or also logits (default: both below 8 billion parameters, else bits)",
    )

    config = verb("config", _config, "Show the resolved options and where each value comes from.", _CONFIG)
    recipe(config)
    config.add_argument("--json", action="store_true", help="print the options as JSON")
    config.add_argument("--describe", action="store_true", help="explain every option instead")
    return parser


def _add_sampling(sample: argparse.ArgumentParser) -> None:
    """Add the options of how answers are drawn and shown."""
    rule = sample.add_argument_group(
        "how tokens are drawn",
        "Bias first, then the temperature; of what is likely then, top-k, top-p and min-p keep some, in this order.",
    )
    rule.add_argument("--temperature", type=float, default=0.7, help="0 takes the most likely token (default: 0.7)")
    rule.add_argument("--top-k", type=int, default=0, help="keep so many most likely tokens (default: 0, all)")
    rule.add_argument("--top-p", type=float, default=1.0, help="keep the fewest that have this probability (default: 1, all)")
    rule.add_argument(
        "--min-p", type=float, default=0.0, help="keep those so likely relative to the likeliest (default: 0, all)"
    )
    rule.add_argument(
        "--logit-bias", type=_bias, action="append", default=[], metavar="ID=BIAS", help="favour a token id; -inf forbids it"
    )
    rule.add_argument("--allow", type=int, action="append", metavar="ID", help="draw only such token ids; may be repeated")
    end = sample.add_argument_group("where an answer ends")
    end.add_argument("--max-tokens", type=int, default=256, help="longest answer in tokens (default: 256)")
    end.add_argument("--min-tokens", type=int, default=0, help="tokens before the first that may end it (default: 0)")
    end.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end before this text; may be repeated")
    end.add_argument("--stop-id", type=int, action="append", default=[], metavar="ID", help="end after this token id as well")
    end.add_argument("--ignore-eos", action="store_true", help="do not end at the model's end tokens")
    shown = sample.add_argument_group("what is shown, with --prompt")
    shown.add_argument("--n", type=int, default=1, help="draw so many answers and show the most likely first (default: 1)")
    shown.add_argument("--json", action="store_true", help="one JSON line per answer, with tokens and log-probabilities")
    shown.add_argument("--logprobs", type=int, metavar="N", help="add the N most likely tokens of each place to the JSON")
    shown.add_argument("--prompt-logprobs", action="store_true", help="add the prompt's log-probabilities to the JSON")


def _bias(text: str) -> tuple[int, float]:
    token, _, bias = text.partition("=")
    return int(token), float(bias)


def _recipe_args(args: argparse.Namespace) -> tuple[str | None, list[str]]:
    """Split a recipe from overrides, so that `rljax train train.steps=5` works without a recipe."""
    words = ([args.recipe] if args.recipe else []) + args.overrides
    first = words[0] if words and "=" not in words[0] else None
    return first, words[1:] if first else words


def _train(args: argparse.Namespace) -> int:
    config = load(*_recipe_args(args))
    use_compilation_cache()
    from rljax import loop

    say = _say if config.telemetry.live != "off" else _quiet
    if args.dry_run:
        loop.check(config, say)
        say("the configuration fits; nothing was compiled or trained")
        return EXIT_DONE
    result = loop.train(config, say)
    if result.stopped:
        say(f"stopped at step {result.step} of {config.train.steps}; the same command continues")
        return EXIT_RETRY
    say(f"done: {result.step} steps; the trained model is in {result.run_dir / 'model'}")
    return EXIT_DONE


def _eval(args: argparse.Namespace) -> int:
    config = load(*_recipe_args(args))
    use_compilation_cache()
    from rljax.evaluate import evaluate

    result = evaluate(config, args.checkpoint, _quiet if args.json else _say)
    if args.json:
        found = {name: getattr(result, name) for name in type(result).__dataclass_fields__ if name != "groups"}
        print(json.dumps({name: value if math.isfinite(value) else None for name, value in found.items()}))
    else:
        print(
            f"accuracy {result.accuracy:.3f}  reward {result.reward_mean:.3f}  on {result.tasks} tasks ({result.failed} not "
            f"scored, {result.truncated_fraction:.0%} truncated, {result.length_mean:.1f} tokens on average)"
        )
    return EXIT_DONE


def _sample(args: argparse.Namespace) -> int:
    if args.prompt is None and (args.n != 1 or args.json):
        raise ValueError("--n and --json are for one answer at a time; add --prompt, or remove them")
    if not args.json and (args.logprobs is not None or args.prompt_logprobs):
        raise ValueError("--logprobs and --prompt-logprobs are shown with --json; add it, or remove them")
    sampling = SamplingParams(
        max_tokens=args.max_tokens,
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        min_p=args.min_p,
        logit_bias=dict(args.logit_bias),
        allowed_token_ids=None if args.allow is None else tuple(args.allow),
        min_tokens=args.min_tokens,
        stop=tuple(args.stop),
        stop_token_ids=tuple(args.stop_id),
        ignore_eos=args.ignore_eos,
        logprobs=args.logprobs,
        prompt_logprobs=args.prompt_logprobs,
    )
    use_compilation_cache()
    from rljax.chat import Chat, ChatOptions, converse

    chat = Chat(args.checkpoint, ChatOptions(sampling, args.context, args.seed, args.system, args.n))
    if args.prompt is None:
        converse(chat)
        return EXIT_DONE
    prompt = sys.stdin.read() if args.prompt == "-" else args.prompt
    if args.n == 1 and not args.json:
        for piece in chat.say(prompt):
            print(piece, end="", flush=True)
        print()
        return EXIT_DONE
    for answer in chat.answers(prompt):
        print(json.dumps(_answer_row(answer.text, answer.completion)) if args.json else f"{answer.text}\n")
    return EXIT_DONE


def _answer_row(text: str, completion: Completion) -> dict[str, Any]:
    """Return an answer as plain data; `prompt_logp` begins with null, because nothing comes before its first token."""
    arrays = {"tokens": completion.tokens, "logp": completion.logp, "logp_raw": completion.logp_raw}
    row: dict[str, Any] = {"text": text, "finish_reason": completion.finish_reason, "stop": completion.stop}
    row |= {name: array.tolist() for name, array in arrays.items() if array is not None}
    if completion.top is not None and completion.top.ids.size:
        row |= {"top_ids": completion.top.ids.tolist(), "top_logp": completion.top.logp.tolist()}
    if completion.prompt_logp is not None:
        row["prompt_logp"] = [None, *completion.prompt_logp[1:].tolist()]
    return row


def _convert(args: argparse.Namespace) -> int:
    from rich.console import Console

    from rljax.convert import convert

    extra: dict[str, Any] = {} if args.shard_size is None else {"shard_size": args.shard_size}
    convert(
        args.source,
        args.target,
        to=args.to,
        base=args.base,
        dtype=args.dtype,
        overwrite=args.overwrite,
        dry_run=args.dry_run,
        verify=args.verify,
        console=Console(),
        **extra,
    )
    return EXIT_DONE


def _config(args: argparse.Namespace) -> int:
    if args.describe:
        print(describe())
        return EXIT_DONE
    config, sources = load_with_sources(*_recipe_args(args))
    print(json.dumps(config.model_dump(mode="json"), indent=2) if args.json else render(config, sources))
    return EXIT_DONE


def use_compilation_cache() -> None:
    """Keep compiled programs between processes, so that a restart does not compile again; JAX's variable wins."""
    if "JAX_COMPILATION_CACHE_DIR" in os.environ:
        return
    import jax

    home = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    jax.config.update("jax_compilation_cache_dir", str(home / "rljax" / "compilation"))


def _say(text: str) -> None:
    print(text, flush=True)


def _quiet(text: str) -> None:
    pass
