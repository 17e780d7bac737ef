"""Django's settings, read from the environment; the table in docs/run-your-own.md describes each.

A file `env` in `ACSINFRA_HOME` (written by `manage.py quickstart`) fills in what the environment does not name, so that
`manage.py createkey` in another shell meets the running quickstart. What is missing or unsafe is reported by
`acsinfra.core.checks`, before a process serves.
"""

import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import django_stubs_ext
import environ
from django.core.exceptions import ImproperlyConfigured
from django.utils.csp import CSP

from acsinfra.core.logs import logging_config
from acsinfra.core.mail import mailer_from_url

# Makes Django's generic classes subscriptable at run time: `admin.ModelAdmin[User]`.
django_stubs_ext.monkeypatch()

BASE_DIR = Path(__file__).resolve().parent.parent


class _Environment(environ.FileAwareEnv):  # type: ignore[misc]
    """A copy of the environment, so that what the home's file fills in does not look like the operator's choice."""

    ENVIRON = dict(os.environ)

    def get_value(self, var: str, *args: Any, **kwargs: Any) -> Any:
        """Say which setting is wrong; its value may be a secret."""
        try:
            return super().get_value(var, *args, **kwargs)
        except (TypeError, ValueError) as error:
            raise ImproperlyConfigured(
                f"{var} in the environment is not what the table of settings in docs/run-your-own.md asks for."
            ) from error


env = _Environment()
HOME = Path(env.str("ACSINFRA_HOME", default=str(Path.cwd() / ".acsinfra"))).resolve()
if (HOME / "env").is_file():
    env.read_env(HOME / "env", overwrite=False)

# Who we are on the network
DEBUG = False
SECRET_KEY = env.str("SECRET_KEY", default="")
SECRET_KEY_FALLBACKS = env.list("SECRET_KEY_FALLBACKS", default=[])
PUBLIC_URL = env.str("PUBLIC_URL", default="").rstrip("/")
ALLOWED_HOSTS = env.list("ALLOWED_HOSTS", default=[])
CSRF_TRUSTED_ORIGINS = [PUBLIC_URL] if PUBLIC_URL else []
BEHIND_TLS_PROXY = env.bool("BEHIND_TLS_PROXY", default=False)
ALLOW_PLAIN_HTTP = env.bool("ALLOW_PLAIN_HTTP", default=False)
ALLOW_PLAIN_SERVICES = env.bool("ALLOW_PLAIN_SERVICES", default=False)

METRICS_TOKEN = env.str("METRICS_TOKEN", default="")

# The parts: PostgreSQL, a Redis or Valkey broker, a folder or S3
DATABASE_URL = env.str("DATABASE_URL", default="")
BROKER_URL = env.str("BROKER_URL", default="")
STORAGE_URL = env.str("STORAGE_URL", default="")
MODELS_CACHE = Path(env.str("MODELS_CACHE", default=str(HOME / "models")))
ENGINE_CACHE = Path(env.str("ENGINE_CACHE", default=str(HOME / "engine-cache")))

INSTALLED_APPS = [
    "acsinfra.apps.OperatorAdminConfig",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.sessions",
    "django.contrib.messages",
    "django.contrib.staticfiles",
    "django.contrib.humanize",
    "axes",
    "rest_framework",
    "adrf",
    "drf_spectacular",
    "drf_spectacular_sidecar",
    "acsinfra",
    "accounts",
    "budgets",
    "inference",
    "harvest",
    "jobs",
]
MIDDLEWARE = [
    "acsinfra.core.middleware.RequestIdMiddleware",
    "acsinfra.core.middleware.ApiMiddleware",
    "acsinfra.core.middleware.PagesOnlyMiddleware",
]
# Sessions, CSRF and messages belong to the pages alone: PagesOnlyMiddleware runs these for paths outside /v1.
PAGES_MIDDLEWARE = [
    "django.middleware.security.SecurityMiddleware",
    "django.middleware.csp.ContentSecurityPolicyMiddleware",
    "acsinfra.core.middleware.BarePagesMiddleware",
    "whitenoise.middleware.WhiteNoiseMiddleware",
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.common.CommonMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
    "django.middleware.clickjacking.XFrameOptionsMiddleware",
    "axes.middleware.AxesMiddleware",
]
# The admin and axes look for their middleware in MIDDLEWARE; they run, but from the list above.
SILENCED_SYSTEM_CHECKS = ["admin.E408", "admin.E409", "admin.E410", "axes.W002"]
ROOT_URLCONF = "acsinfra.urls"
APPEND_SLASH = False
ASGI_APPLICATION = "acsinfra.asgi.application"
TEMPLATES = [
    {
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "DIRS": [BASE_DIR / "templates"],
        "APP_DIRS": True,
        "OPTIONS": {
            "context_processors": [
                "django.template.context_processors.request",
                "django.contrib.auth.context_processors.auth",
                "django.contrib.messages.context_processors.messages",
            ]
        },
    }
]

# psycopg's pool gives a view's ORM a connection for one step; the hot path has its own async pool (core.db).
DATABASES: dict[str, dict[str, Any]] = {"default": {"ENGINE": "django.db.backends.dummy"}}
if DATABASE_URL:
    try:
        named = env.db_url_config(DATABASE_URL)
    except ValueError as error:
        raise ImproperlyConfigured("DATABASE_URL is no URL: postgresql://user:password@host:5432/name.") from error
    # Short times: a request must not wait long for a database that is away.
    pool = {"min_size": 0, "max_size": env.int("DATABASE_POOL_SIZE", default=8), "timeout": 4, "reconnect_timeout": 4}
    options = {"connect_timeout": 5, **named.get("OPTIONS", {}), "pool": pool}
    DATABASES["default"] = {**named, "CONN_MAX_AGE": 0, "OPTIONS": options}
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"

AUTH_USER_MODEL = "accounts.User"
AUTH_PASSWORD_VALIDATORS = [
    {"NAME": "django.contrib.auth.password_validation.MinimumLengthValidator", "OPTIONS": {"min_length": 12}},
    {"NAME": "django.contrib.auth.password_validation.CommonPasswordValidator"},
    {"NAME": "django.contrib.auth.password_validation.UserAttributeSimilarityValidator"},
]
AUTHENTICATION_BACKENDS = ["axes.backends.AxesStandaloneBackend", "django.contrib.auth.backends.ModelBackend"]
# Guessing: so many failures of one address or for one name lock it out for a while, counted in the database.
AXES_LOCKOUT_PARAMETERS = ["ip_address", "username"]
AXES_FAILURE_LIMIT = env.int("SIGN_IN_FAILURES", default=20)
AXES_COOLOFF_TIME = timedelta(seconds=env.float("SIGN_IN_LOCKOUT_SECONDS", default=300))
AXES_RESET_ON_SUCCESS = True
AXES_RESET_COOL_OFF_ON_FAILURE_DURING_LOCKOUT = False
AXES_LOCKOUT_TEMPLATE = "accounts/locked.html"
AXES_DISABLE_ACCESS_LOG = True
AXES_VERBOSE = False
# Who may get an account: whom an operator makes one (closed), or invites (invite), or also approves (approval).
SIGN_UP = env.str("SIGN_UP", default="invite")
if SIGN_UP not in ("closed", "invite", "approval"):
    raise ImproperlyConfigured("SIGN_UP is one of closed, invite, approval.")
# Who hears by mail of those that wait for approval; none named: every active superuser.
OPERATOR_EMAILS = env.list("OPERATOR_EMAILS", default=[])
PASSWORD_RESET_TIMEOUT = 24 * 3600
MAILERS = {"default": mailer_from_url(env.str("EMAIL_URL", default=(HOME / "mail").as_uri()))}
DEFAULT_FROM_EMAIL = SERVER_EMAIL = env.str("EMAIL_FROM", default="acs-infra@localhost")
LOGIN_URL = "/app/sign-in"
LOGIN_REDIRECT_URL = "/app"
LOGOUT_REDIRECT_URL = "/app/sign-in"

USE_TZ = True
TIME_ZONE = "UTC"
USE_I18N = False
FORMAT_MODULE_PATH = ["acsinfra.formats"]
STATIC_URL = "/static/"
WHITENOISE_USE_FINDERS = True
WHITENOISE_AUTOREFRESH = False

SECURE_PROXY_SSL_HEADER = ("HTTP_X_FORWARDED_PROTO", "https") if BEHIND_TLS_PROXY else None
SESSION_COOKIE_SECURE = CSRF_COOKIE_SECURE = not ALLOW_PLAIN_HTTP
SESSION_COOKIE_HTTPONLY = True
SECURE_HSTS_SECONDS = 0 if ALLOW_PLAIN_HTTP else 31_536_000
SECURE_REFERRER_POLICY = "same-origin"
X_FRAME_OPTIONS = "DENY"
SECURE_CSP = {
    "default-src": [CSP.NONE],
    "script-src": [CSP.SELF],
    "style-src": [CSP.SELF],
    "img-src": [CSP.SELF, "data:"],
    "font-src": [CSP.SELF],
    "connect-src": [CSP.SELF],
    "form-action": [CSP.SELF],
    "base-uri": [CSP.NONE],
    "frame-ancestors": [CSP.NONE],
}

LOGGING_CONFIG = None
LOG_LEVEL = env.str("LOG_LEVEL", default="INFO")
try:
    logging_config(LOG_LEVEL)
except ValueError as error:
    raise ImproperlyConfigured("LOG_LEVEL is one of DEBUG, INFO, WARNING, ERROR, CRITICAL.") from error

# The HTTP API
MAX_BODY_BYTES = 10 * 1024 * 1024
MAX_HARVEST_BODY_BYTES = 50 * 1024 * 1024
DATA_UPLOAD_MAX_MEMORY_SIZE = MAX_HARVEST_BODY_BYTES
REST_FRAMEWORK = {
    "DEFAULT_AUTHENTICATION_CLASSES": ["accounts.authentication.ApiKeyAuthentication"],
    "DEFAULT_PERMISSION_CLASSES": ["rest_framework.permissions.IsAuthenticated"],
    "DEFAULT_RENDERER_CLASSES": ["acsinfra.core.renderers.JSONRenderer"],
    "DEFAULT_PARSER_CLASSES": ["acsinfra.core.parsers.StrictJSONParser"],
    "DEFAULT_SCHEMA_CLASS": "acsinfra.core.schema.ApiSchema",
    "EXCEPTION_HANDLER": "acsinfra.core.errors.exception_handler",
    "UNAUTHENTICATED_USER": None,
}
SPECTACULAR_SETTINGS = {
    "TITLE": "ACS Infra",
    "VERSION": "1",
    "OAS_VERSION": "3.1.0",
    "SERVE_INCLUDE_SCHEMA": False,
    "ENUM_GENERATE_CHOICE_DESCRIPTION": False,
    "POSTPROCESSING_HOOKS": ["acsinfra.core.schema_document.complete_document"],
}

# Celery: messages are hints, JSON only, no results
CELERY = {
    "broker_url": BROKER_URL,
    "task_serializer": "json",
    "accept_content": ["json"],
    "task_ignore_result": True,
    "worker_prefetch_multiplier": 1,
    "worker_hijack_root_logger": False,
    "worker_send_task_events": False,
    "worker_enable_remote_control": False,
    "broker_connection_retry_on_startup": True,
    "broker_transport_options": {
        "visibility_timeout": 24 * 3600,
        "socket_connect_timeout": 5,
        # Longer than Celery waits for a message.
        "socket_timeout": 30,
        "socket_keepalive": True,
    },
}

# Limits: each is the default that an operator may override for one User in the admin
REQUESTS_AT_ONCE = env.int("REQUESTS_AT_ONCE", default=16)
REQUESTS_QUEUED = env.int("REQUESTS_QUEUED", default=64)
REQUESTS_PER_MINUTE = env.int("REQUESTS_PER_MINUTE", default=600)
MONTHLY_TOKENS = env.int("MONTHLY_TOKENS", default=5_000_000)
JOBS_UNFINISHED = env.int("JOBS_UNFINISHED", default=100)
JOBS_RUNNING = env.int("JOBS_RUNNING", default=8)
JOBS_PER_ENGINE = env.int("JOBS_PER_ENGINE", default=32)
HARVESTS_UNFINISHED = env.int("HARVESTS_UNFINISHED", default=1)
HARVESTS_PER_MONTH: int | None = env.int("HARVESTS_PER_MONTH", default=None)
HARVEST_WAITS_AT_ONCE = env.int("HARVEST_WAITS_AT_ONCE", default=4)
STORAGE_QUOTA_BYTES: int | None = env.int("STORAGE_QUOTA_BYTES", default=None)
HARVEST_MAX_BYTES = env.int("HARVEST_MAX_BYTES", default=200 * 1024**3)

# What a runner has read and not yet stored; a prompt whose values are more is there alone
HARVEST_MEMORY_BYTES = env.int("HARVEST_MEMORY_BYTES", default=256 * 1024 * 1024)

# A job of so many tokens has its runner compile the model on a CPU; 0 compiles for none. With SmolLM2-135M it costs a
# minute, half of that once ENGINE_CACHE has it, and saves a tenth of each token's time: that pays after 140,000 to
# 430,000 tokens on slow cores (500 tokens a second), and later on fast ones.
HARVEST_COMPILE_TOKENS = env.int("HARVEST_COMPILE_TOKENS", default=500_000)

# Bounds of one request
WORK_BOUND_TOKENS = 32_000
MAX_ACTIVATION_BYTES = env.int("MAX_ACTIVATION_BYTES", default=128 * 1024 * 1024)
FULL_VOCAB_MAX_PROMPT_TOKENS = env.int("FULL_VOCAB_MAX_PROMPT_TOKENS", default=1024)
FULL_VOCAB_MAX_LOGPROBS = env.int("FULL_VOCAB_MAX_LOGPROBS", default=4_000_000)

# Times
ENGINE_TIME_LIMIT = timedelta(seconds=env.float("ENGINE_TIME_LIMIT", default=540))
LEASE = timedelta(seconds=env.float("LEASE_SECONDS", default=30))
RUNNER_IDLE = timedelta(seconds=env.float("RUNNER_IDLE_SECONDS", default=900))
LEASE_RENEWAL = timedelta(seconds=env.float("LEASE_RENEWAL_SECONDS", default=10))
HEARTBEAT = timedelta(seconds=env.float("HEARTBEAT_SECONDS", default=5))
ENGINE_SILENT_AFTER = timedelta(seconds=env.float("ENGINE_SILENT_AFTER_SECONDS", default=20))
RUNNER_GRACE = timedelta(seconds=env.float("RUNNER_GRACE_SECONDS", default=30))
HARVEST_PENDING_AT_MOST = timedelta(hours=env.float("HARVEST_PENDING_HOURS", default=24))
HARVEST_FILES_KEPT: timedelta | None = (
    timedelta(days=env.float("HARVEST_FILES_KEPT_DAYS")) if env.str("HARVEST_FILES_KEPT_DAYS", default="") else None
)
IDEMPOTENCY_KEPT = timedelta(hours=env.float("IDEMPOTENCY_KEPT_HOURS", default=24))
JOB_RESULTS_KEPT = timedelta(days=env.float("JOB_RESULTS_KEPT_DAYS", default=30))
LINKS_EXPIRE_AFTER = timedelta(days=env.float("LINKS_EXPIRE_DAYS", default=7))
