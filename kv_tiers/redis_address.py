"""Where a Redis is and how to be let in: one URL for the raw connections and for redis-py."""

from __future__ import annotations

import ssl
from dataclasses import dataclass, field
from urllib.parse import parse_qsl, unquote, urlencode, urlsplit, urlunsplit

_DEFAULT_PORT = 6379
_SCHEMES = ("redis", "rediss", "unix", "redis+cluster", "rediss+cluster")
_OPTIONS = (
    "cluster",
    "db",
    "ssl_ca_certs",
    "ssl_cert_reqs",
    "ssl_certfile",
    "ssl_check_hostname",
    "ssl_keyfile",
)
_ENCODE = "in user and password /, ?, # and % are written %2F, %3F, %23 and %25"
_NO = ("0", "false", "no", "none")


@dataclass(frozen=True)
class RedisAddress:
    """A parsed URL. `path` of a unix socket, or `host` and `port`. `client_url` is what redis-py is given."""

    host: str
    port: int
    path: str | None
    db: int
    username: str | None
    password: str | None = field(repr=False)
    tls: ssl.SSLContext | None = field(repr=False)
    cluster: bool
    client_url: str = field(repr=False)

    @classmethod
    def parse(cls, url: str) -> RedisAddress:
        """ValueError (without the password) for what is no Redis URL, or has an option nobody here knows.

            redis://user:password@host:port/db     rediss:// with TLS     unix://user:password@/path/to/socket?db=1
            redis+cluster://, rediss+cluster://, or ?cluster=1: any node of a cluster

        TLS options in the query, named as redis-py's: ssl_ca_certs, ssl_certfile, ssl_keyfile (paths), ssl_cert_reqs
        (none or required), ssl_check_hostname.
        """
        try:
            parts = urlsplit(url)
            port = parts.port or _DEFAULT_PORT
        except ValueError:  # whose text may be a piece of the password
            raise ValueError(f"a Redis URL has no such host or port; {_ENCODE}") from None
        if parts.fragment or ("@" in parts.query and "@" not in parts.netloc):
            raise ValueError(f"a Redis URL has its password before path and options, and no #; {_ENCODE}")
        if parts.scheme not in _SCHEMES:
            raise ValueError(f"a Redis URL starts with {', '.join(f'{name}://' for name in _SCHEMES)}")
        options = dict(parse_qsl(parts.query))
        unknown = sorted(set(options) - set(_OPTIONS))
        if unknown:
            raise ValueError(f"Redis URL options are {', '.join(_OPTIONS)}, not {', '.join(unknown)}")
        scheme, _, suffix = parts.scheme.partition("+")
        cluster = suffix == "cluster" or options.get("cluster", "0") not in _NO
        unix = scheme == "unix"
        db = options.get("db") or ("" if unix else parts.path.strip("/")) or "0"
        if not (db.isascii() and db.isdigit()):
            raise ValueError(f"a Redis database is a number; {_ENCODE}")
        if cluster and (unix or int(db)):
            raise ValueError("a Redis cluster has no unix socket and only database 0")
        if unix and not parts.path:
            raise ValueError("unix:// needs the path of a socket")
        rest = {name: value for name, value in options.items() if name != "cluster"}
        return cls(
            host=parts.hostname or "localhost",
            port=port,
            path=unquote(parts.path) if unix else None,
            db=int(db),
            username=unquote(parts.username) if parts.username else None,
            password=unquote(parts.password) if parts.password else None,
            tls=_tls(options) if scheme == "rediss" else None,
            cluster=cluster,
            client_url=urlunsplit((scheme, parts.netloc, parts.path, urlencode(rest), "")),
        )


def _tls(options: dict[str, str]) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=options.get("ssl_ca_certs"))
    if options.get("ssl_check_hostname", "1").lower() in _NO:
        context.check_hostname = False
    if options.get("ssl_cert_reqs", "required").lower() in _NO:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    if "ssl_certfile" in options:
        context.load_cert_chain(options["ssl_certfile"], options.get("ssl_keyfile"))
    return context
