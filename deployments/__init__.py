"""The Ray Serve edge of kvtide. `serve run deployments:app` builds the application from `deployments.service`."""


def __getattr__(name: str) -> object:
    # Lazy, so that the command line and the tests of single parts do not pay for importing Ray Serve.
    if name == "app":
        from deployments.service import app

        return app
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
