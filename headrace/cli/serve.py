"""``headrace serve``: the HTTP service."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import socket
import ssl
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.checkpoint.resolve import is_engine_folder
from headrace.cli._options import DEFAULT_MODEL, add_debug_option, add_model_options, llm_arguments, positive
from headrace.config import EngineConfig
from headrace.errors import HeadraceError
from headrace.lora import LoraRequest
from headrace.serve.settings import MIB, ServeSettings

if TYPE_CHECKING:
    from headrace.serve.run import Ending, Loaded

_DEFAULTS = ServeSettings()
_ENGINE = EngineConfig(model="")

DEFAULT_HOST = "127.0.0.1"
DEFAULT_PORT = 8000
API_KEY_VARIABLE = "HEADRACE_API_KEY"
ADMIN_KEY_VARIABLE = "HEADRACE_ADMIN_KEY"


def seconds(text: str) -> float:
    """argparse type: seconds, not below 0."""
    value = float(text)
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a number of seconds from 0 on")
    return value


def named_path(text: str) -> tuple[str, str]:
    """argparse type: NAME=PATH."""
    name, sign, path = text.partition("=")
    if not (name and sign and path):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=PATH")
    return name, path


def add_parser(subcommands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add this subcommand."""
    parser = subcommands.add_parser(
        "serve",
        help="serve OpenAI's API over HTTP",
        description="Serve a model over HTTP with OpenAI's API: /v1/chat/completions, /v1/completions, /v1/models; /docs shows all routes.",
    )
    parser.add_argument("served", nargs="?", metavar="MODEL", help="the same as --model: an engine folder, a model file, a hub id")
    add_model_options(parser)
    group = parser.add_argument_group("service")
    group.add_argument("--host", default=DEFAULT_HOST, help=f"address to listen on (default: {DEFAULT_HOST}; 0.0.0.0: all)")
    group.add_argument("--port", type=int, default=DEFAULT_PORT, help=f"default: {DEFAULT_PORT}; 0: one that is free")
    group.add_argument("--served-model-name", nargs="+", default=[], metavar="NAME", help="what clients call the model (default: MODEL)")
    group.add_argument("--lora", action="append", type=named_path, default=[], metavar="NAME=PATH", help="an adapter, chosen as a model")
    group.add_argument(
        "--api-key",
        action="append",
        default=[],
        metavar="KEY",
        help=f"required of clients; may be given several times (or {API_KEY_VARIABLE})",
    )
    group.add_argument("--admin-key", metavar="KEY", help=f"opens the admin routes (or {ADMIN_KEY_VARIABLE})")
    group.add_argument("--profile-dir", metavar="FOLDER", help="where /start_profile and /stop_profile write (default: none are taken)")
    group.add_argument("--cors-origin", action="append", default=[], metavar="ORIGIN", help="pages that may call; *: all")
    group.add_argument("--ssl-certfile", type=Path, metavar="FILE", help="certificate chain, for https")
    group.add_argument("--ssl-keyfile", type=Path, metavar="FILE", help="its key, if it is not in the same file")
    group.add_argument(
        "--postprocess-workers", type=int, default=0, metavar="N", help="processes that make the texts, for each frontend (default: 0)"
    )
    group.add_argument(
        "--frontends", type=positive, default=1, metavar="K", help="processes that share the port and the model (default: 1: this one)"
    )
    group.add_argument("--access-log", action="store_true", help="log every request")
    group = parser.add_argument_group("limits")
    group.add_argument("--max-queued-requests", type=positive, default=4096, metavar="N", help="that wait (default: 4096); more get 503")
    group.add_argument("--max-queued-tokens", type=positive, default=4 * MIB, metavar="N", help="of their prompts (default: 4 Mi)")
    group.add_argument(
        "--max-body-bytes", type=positive, default=_DEFAULTS.max_body_bytes, metavar="N", help="of one request (default: 16 MiB)"
    )
    group.add_argument("--max-prompt-chars", type=positive, metavar="N", help="of one prompt (default: 64 for each token of the context)")
    for option, name, what in (
        ("--request-timeout", "request_timeout", "for a request that says nothing itself (default: no limit)"),
        ("--drain-timeout", "drain_timeout", f"for running requests after SIGTERM (default: {_DEFAULTS.drain_timeout:g})"),
        ("--write-timeout", "write_timeout", f"until a client that reads nothing is cut (default: {_DEFAULTS.write_timeout:g})"),
        (
            "--keep-alive-interval",
            "keep_alive_interval",
            f"of silence until a stream gets a comment (default: {_DEFAULTS.keep_alive_interval:g})",
        ),
        ("--resume-grace", "resume_grace", f"for which a resumable stream waits for its client (default: {_DEFAULTS.resume_grace:g})"),
    ):
        group.add_argument(option, dest=name, type=seconds, default=getattr(_DEFAULTS, name), metavar="SECONDS", help=what)
    group.add_argument(
        "--resume-bytes", type=positive, default=_DEFAULTS.resume_bytes, metavar="N", help="kept for resumable streams (default: 64 MiB)"
    )
    group = parser.add_argument_group("death")
    group.add_argument(
        "--on-engine-death", choices=("restart", "fail"), default="restart", help="fail: exit with code 3 (default: restart the world)"
    )
    group.add_argument("--on-hang", choices=("report", "kill"), default="kill", help="of a world without progress (default: kill)")
    group.add_argument("--progress-timeout", type=seconds, default=60.0, metavar="SECONDS", help="until it counts as hung (default: 60)")
    add_debug_option(parser)
    parser.set_defaults(run=run, parser=parser)


def settings_of(arguments: argparse.Namespace) -> ServeSettings:
    """Of the service. Raises RequestError for an adapter that cannot be read."""
    same = (
        "max_body_bytes",
        "max_prompt_chars",
        "request_timeout",
        "drain_timeout",
        "write_timeout",
        "keep_alive_interval",
        "resume_grace",
        "resume_bytes",
        "access_log",
    )
    keys = arguments.api_key or [key for key in os.environ.get(API_KEY_VARIABLE, "").split(",") if key]
    return ServeSettings(
        model_names=tuple(arguments.served_model_name) or _own_names(arguments.model),
        loras={name: LoraRequest(name, path) for name, path in arguments.lora},
        api_keys=tuple(keys),
        admin_key=arguments.admin_key or os.environ.get(ADMIN_KEY_VARIABLE) or None,
        profile_dir=None if arguments.profile_dir is None else str(Path(arguments.profile_dir).absolute()),
        cors_origins=tuple(arguments.cors_origin),
        **{name: getattr(arguments, name) for name in same},
    )


def _own_names(model: str) -> tuple[str, ...]:
    """What clients may call it if nobody says: as it was called here, unless that is a place on this machine."""
    is_place = Path(model).exists() if os.sep in model else is_engine_folder(model)
    return () if is_place else (model,)


def serving_arguments(arguments: argparse.Namespace) -> dict[str, Any]:
    """Keyword arguments of ``LLM``."""
    names = ("max_queued_requests", "max_queued_tokens", "on_engine_death", "on_hang", "progress_timeout", "postprocess_workers")
    # Adapters that are named decide who runs the model; without any that is open.
    loras = {"max_loras": _ENGINE.max_loras} if arguments.lora else {}
    return llm_arguments(arguments) | loras | {name: getattr(arguments, name) for name in names}


def run(arguments: argparse.Namespace) -> int:
    """Until a signal or the death of the world; docs/operations.md lists the codes."""
    from headrace.cli import CUT, ENGINE_DIED, INTERRUPTED, OK
    from headrace.llm import LLM
    from headrace.serve.loading import Loading
    from headrace.serve.run import Ending, listen, listen_first, load, tls_context
    from headrace.serve.service import BACKLOG

    if arguments.served is not None:
        if arguments.model != DEFAULT_MODEL:
            arguments.parser.error(f"two models, {arguments.served} and --model {arguments.model}: give one")
        arguments.model = arguments.served
    settings = settings_of(arguments)
    tls = None
    if arguments.ssl_certfile is not None:
        try:
            tls = tls_context(arguments.ssl_certfile, arguments.ssl_keyfile)
        except ssl.SSLError as error:
            raise HeadraceError(f"the certificate or its key cannot be used: {error}") from error
    elif arguments.ssl_keyfile is not None:
        arguments.parser.error("--ssl-keyfile needs --ssl-certfile")
    _log_to_stderr()
    several = arguments.frontends > 1
    # Before the model is loaded: a port that is taken is told at once.
    listener = (listen_first if several else listen)(arguments.host, arguments.port)
    # Texts are made where they are sent from.
    options = serving_arguments(arguments) | ({"postprocess_workers": 0} if several else {})
    loading = Loading(lambda: LLM(**options, wait=False))
    try:
        listener.listen(BACKLOG)
        host, port = listener.getsockname()[:2]
        where = f"{'http' if tls is None else 'https'}://{f'[{host}]' if ':' in host else host}:{port}"

        def begin(loaded: Loaded) -> Awaitable[Ending]:
            def say() -> None:
                print(f"headrace: serving {loaded.llm.facts.model} on {where} (routes: {where}/docs)", file=sys.stderr, flush=True)

            return _serve(loaded, settings, listener, tls, say, arguments)

        print(f"headrace: loading {arguments.model}; health and a page are on {where} meanwhile", file=sys.stderr, flush=True)
        ending = asyncio.run(load(loading, settings, listener, tls, begin))
    finally:
        loading.close()
        listener.close()
    return {Ending.DRAINED: OK, Ending.CUT: CUT, Ending.INTERRUPTED: INTERRUPTED, Ending.DEAD: ENGINE_DIED}[ending]


async def _serve(
    loaded: Loaded, settings: ServeSettings, listener: socket.socket, tls: ssl.SSLContext | None, say: Callable[[], None], arguments: Any
) -> Ending:
    if arguments.frontends == 1:
        from headrace.serve.run import serve

        return await serve(loaded.llm, settings, [listener], loaded.signals, tls, room=loaded.room, on_ready=say)
    from headrace.serve.frontend import FrontendOrder
    from headrace.serve.frontends import Frontends

    order = FrontendOrder(
        launcher_pid=os.getpid(),
        number=0,
        handle=loaded.llm.attach_handle,
        host=arguments.host,
        port=listener.getsockname()[1],
        listener=-1,
        certfile=arguments.ssl_certfile,
        keyfile=arguments.ssl_keyfile,
        settings=settings,
        max_queued_requests=arguments.max_queued_requests,
        max_queued_tokens=arguments.max_queued_tokens,
        progress_timeout=arguments.progress_timeout,
        postprocess_workers=arguments.postprocess_workers,
    )
    return await Frontends(loaded, listener, order, arguments.frontends).run(say)


def _log_to_stderr() -> None:
    """What a supervisor's journal should have: this is no command whose one error is told at its end."""
    logger = logging.getLogger("headrace")
    if logging.getLogger().handlers:
        return  # --debug has set it up
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(name)s %(levelname)s: %(message)s"))
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
