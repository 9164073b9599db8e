"""`kvtide`: serve, tiers, generate, inspect, config, fetch."""

import argparse
import json
import os
import signal
import sys
from collections.abc import Sequence

from pydantic import ValidationError

from deployments.config import AppArgs, resolve
from deployments.proxy import haproxy
from engine.environment import refuse_foreign_kernels
from engine.errors import KvtideError


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; → exit status."""
    parsed = _parse(arguments)
    try:
        status = _run(parsed)
        sys.stdout.flush()
        return status
    except BrokenPipeError:
        # Whoever read us has enough (`kvtide config | head -1`). Python would complain again when it flushes.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Flags and name=value words in any order (argparse itself forgets the words behind the second flag)."""
    parser = _parser()
    parsed, more = parser.parse_known_args(arguments)
    if flags := [word for word in more if word.startswith("-")]:
        parser.error(f"unrecognized arguments: {' '.join(flags)}")
    parsed.options += more
    if parsed.command == "inspect" and "=" in parsed.file:
        # Options came first; the file is the word that is none.
        words = [parsed.file, *parsed.options]
        parsed.file = next((word for word in words if "=" not in word), parsed.file)
        parsed.options = [word for word in words if word != parsed.file]
    if parsed.command == "tiers":
        parsed.words = [word for word in parsed.options if "=" not in word or word.startswith("http")]
        parsed.options = [word for word in parsed.options if word not in parsed.words]
    return parsed


def _run(parsed: argparse.Namespace) -> int:
    try:
        refuse_foreign_kernels()
        options = parse_options(parsed.options)
        commands = {
            "serve": _serve,
            "tiers": _tiers,
            "generate": _generate,
            "inspect": _inspect,
            "config": _config,
            "fetch": _fetch,
        }
        return commands[parsed.command](options, parsed)
    except (ValidationError, ValueError) as error:
        print(f"kvtide: {_explain(error)}", file=sys.stderr)
        return 2
    except (KvtideError, RuntimeError) as error:
        print(f"kvtide: {error}", file=sys.stderr)
        return 1


def parse_options(words: Sequence[str]) -> AppArgs:
    """`name=value` words to checked options, as `serve run deployments:app name=value …` takes them.

    Raises ValueError naming the word or the valid options.
    """
    given: dict[str, object] = {}
    for word in words:
        name, separator, value = word.partition("=")
        if not separator:
            raise ValueError(f"{word!r} is not name=value; valid options: {', '.join(AppArgs.model_fields)}")
        if name in given:
            raise ValueError(f"{name} is given twice")
        given[name] = value
    return AppArgs.model_validate(given)


def _explain(error: Exception) -> str:
    if not isinstance(error, ValidationError):
        return str(error)
    lines = []
    for problem in error.errors():
        place = ".".join(str(part) for part in problem["loc"])
        message = problem["msg"].removeprefix("Value error, ")
        lines.append(f"{place}: {message}" if place else message)
    return "; ".join(lines)


def _port(text: str) -> int:
    """A TCP port; argparse turns the ValueError into a message that names the option."""
    if not 1 <= int(text) <= 65535:
        raise argparse.ArgumentTypeError(f"{text} is not a port; valid: 1 to 65535")
    return int(text)


def _host(text: str) -> str:
    """An address to listen on that includes 127.0.0.1, through which we look whether the service is ready."""
    known = {"127.0.0.1": "127.0.0.1", "localhost": "127.0.0.1", "0.0.0.0": "0.0.0.0"}
    if text not in known:
        raise argparse.ArgumentTypeError(
            f"{text} is not one of {', '.join(known)}; kvtide looks at 127.0.0.1 whether the service is ready"
        )
    return known[text]


def _positive(text: str) -> int:
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not positive")
    return int(text)


def _amount(text: str) -> int | float | str:
    """A budget: tokens, a fraction, or bytes with their unit; what is none of them is for the recipe to refuse."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _fields(text: str) -> dict[str, object]:
    try:
        given = json.loads(text)
    except json.JSONDecodeError:
        given = None
    if not isinstance(given, dict):
        raise argparse.ArgumentTypeError(f'{text!r} is not a JSON object like {{"window": 32}}')
    return given


def _serve(options: AppArgs, parsed: argparse.Namespace) -> int:
    from deployments.launch import launch

    return launch(options, host=parsed.host, port=parsed.port)


def _tiers(options: AppArgs, parsed: argparse.Namespace) -> int:
    from deployments.tiers_command import make_command, run

    text = sys.stdin.read() if parsed.prompt == "-" else parsed.prompt
    prompt = {"messages": [{"role": "user", "content": text}]} if parsed.chat else {"prompt": text}
    given = {
        **(prompt if text is not None else {}),
        "tiers": parsed.tier or None,
        "ttl_s": parsed.ttl,
        "node": parsed.node,
        "cache_salt": parsed.salt,
    }
    fields = {name: value for name, value in given.items() if value is not None}
    command = make_command(parsed.words, fields, watch=parsed.watch, as_json=parsed.json)
    key = options.api_key
    return run(command, None if key is None else key.get_secret_value())


def _config(options: AppArgs, parsed: argparse.Namespace) -> int:
    resolved = resolve(options)
    if haproxy() is None:
        resolved.environment["RAY_SERVE_ENABLE_HA_PROXY"] = "0"
    print(resolved.model_dump_json(indent=2))
    return 0


def _fetch(options: AppArgs, parsed: argparse.Namespace) -> int:
    from engine.weights import ensure_weights

    print(ensure_weights(options.model, progress=True))
    return 0


def _generate(options: AppArgs, parsed: argparse.Namespace) -> int:
    from deployments.offline import generate

    text = sys.stdin.read() if parsed.prompt == "-" else parsed.prompt
    generate(options, text, chat=parsed.chat, max_tokens=parsed.max_tokens, temperature=parsed.temperature)
    return 0


def _inspect(options: AppArgs, parsed: argparse.Namespace) -> int:
    from deployments.inspection.run import inspect, make_inspection

    wanted = make_inspection(
        parsed.file,
        policies=parsed.policy,
        recipes=parsed.recipe,
        budget=parsed.budget,
        kv=parsed.kv,
        chat=parsed.chat,
        out=parsed.out,
    )
    for path in inspect(options, wanted):
        print(path, flush=True)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kvtide", description="Long-context LLM serving in which evicting KV loses nothing."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    serve = commands.add_parser("serve", help="run the service on this machine and print its URL")
    serve.add_argument(
        "--host", type=_host, default="127.0.0.1", help="127.0.0.1 (default) or 0.0.0.0 for everybody"
    )
    serve.add_argument("--port", type=_port, default=8000, help="TCP port to listen on; default 8000")
    _add_tiers(commands.add_parser("tiers", help="show the KV tiers of a running service, or command them"))
    generate = commands.add_parser("generate", help="run one prompt through the engine alone, without Ray")
    generate.add_argument("--prompt", required=True, help="the text, or - for standard input")
    generate.add_argument("--chat", action="store_true", help="apply the model's chat template")
    generate.add_argument("--max-tokens", type=_positive, default=128)
    generate.add_argument("--temperature", type=float, default=0.0)
    inspect = commands.add_parser(
        "inspect", help="draw what recipes keep of a text: a PNG and an HTML page each"
    )
    inspect.add_argument("file", metavar="FILE", help="the text, or - for standard input")
    inspect.add_argument(
        "--policy", action="append", default=[], help="eviction policy; again for another picture"
    )
    inspect.add_argument(
        "--recipe", action="append", default=[], help="recipe by name; again for another picture"
    )
    inspect.add_argument(
        "--budget", type=_amount, help="tokens, fraction of the text, or bytes (64MiB) to keep"
    )
    inspect.add_argument("--kv", type=_fields, default={}, metavar="JSON", help="further recipe fields")
    inspect.add_argument("--chat", action="store_true", help="apply the model's chat template")
    inspect.add_argument(
        "--out", metavar="PREFIX", help="files' name without .png and .html; default: FILE's, with .kept"
    )
    commands.add_parser("config", help="print the resolved configuration")
    commands.add_parser("fetch", help="get the model's weights and print their folder")
    for command in commands.choices.values():
        command.add_argument("options", nargs="*", metavar="name=value", help="options; see `kvtide config`")
    return parser


def _add_tiers(tiers: argparse.ArgumentParser) -> None:
    tiers.usage = (
        "kvtide tiers [URL] [--watch] [--json] [api_key=…]\n"
        "       kvtide tiers flush [URL] [--tier TIER]\n"
        "       kvtide tiers pin|unpin|prefetch|evict [URL] --prompt TEXT [--chat] [--salt SALT] …"
    )
    tiers.add_argument("--watch", action="store_true", help="show them again every second")
    tiers.add_argument("--json", action="store_true", help="print the service's answer")
    tiers.add_argument("--prompt", help="whose blocks: the text, or - for standard input")
    tiers.add_argument(
        "--chat", action="store_true", help="the text is one user message in the chat template"
    )
    tiers.add_argument("--salt", help="the `cache_salt` that the prompt is asked with")
    tiers.add_argument("--ttl", type=float, metavar="SECONDS", help="of pin: how long; default: until unpin")
    tiers.add_argument(
        "--tier", action="append", help="of evict and flush: cpu, nvme or redis; again for more"
    )
    tiers.add_argument("--node", help="of prefetch: where to")


if __name__ == "__main__":
    sys.exit(main())
