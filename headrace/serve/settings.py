"""What an operator decides about the service; the command line makes it, nothing below reads argv or the environment."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from headrace.lora import LoraRequest

MIB = 1 << 20


class ServeSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of one frontend.

    Attributes:
        model_names: names that clients may give the model, the first of them being what answers carry; empty: that of the engine.
        loras: name -> adapter; a client chooses one by giving its name as the model.
        api_keys: a request for anything but health, metrics and documentation must bring one of these; empty: none is needed.
        admin_key: for routes that concern everybody; None: these are switched off.
        profile_dir: where ranks write profiles, each on its own machine; None: none are taken.
        cors_origins: origins whose pages may call; "*": all.
        max_body_bytes: of a request, also after decompression.
        max_prompt_chars: of a prompt or of all messages of a chat together; None: 64 for each token of the context, more than any text
            that fits has.
        body_timeout: seconds in which a body must have arrived.
        keep_alive_interval: seconds of silence after which a stream gets a comment, so that nothing between takes it for dead.
        write_timeout: seconds that a client may leave what is sent to it unread, before it counts as gone.
        request_timeout: seconds that a request may take in all, where it does not say less itself; None: no limit.
        drain_timeout: seconds that running requests get to end after SIGTERM.
        resume_grace: seconds for which a resumable stream waits for its client to come back.
        resume_bytes: of all resumable streams together, what is kept for clients to come back to.
        threads: for tokenizing, templates and grammars.
        access_log: log every request.
    """

    model_names: tuple[str, ...] = ()
    loras: Mapping[str, LoraRequest] = {}
    api_keys: tuple[str, ...] = ()
    admin_key: str | None = None
    profile_dir: str | None = None
    cors_origins: tuple[str, ...] = ()
    max_body_bytes: int = 16 * MIB
    max_prompt_chars: int | None = None
    body_timeout: float = 30.0
    keep_alive_interval: float = 15.0
    write_timeout: float = 30.0
    request_timeout: float | None = None
    drain_timeout: float = 30.0
    resume_grace: float = 30.0
    resume_bytes: int = 64 * MIB
    threads: int = 4
    access_log: bool = False
