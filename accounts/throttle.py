"""How often one address may ask for mail or an account: counted in Redis, right across processes."""

import redis
import structlog
from django.conf import settings
from django.http import HttpRequest
from redis.exceptions import RedisError

logger = structlog.get_logger(__name__)

PATIENCE_SECONDS = 1.0


def may_go_on(request: HttpRequest, what: str, *, times: int, seconds: int) -> bool:
    """Count one `what` of the request's address; False past `times` within `seconds`. Without Redis, always True."""
    name = f"throttle:{what}:{request.META.get('REMOTE_ADDR', '')}"
    try:
        with redis.Redis.from_url(
            settings.BROKER_URL, socket_timeout=PATIENCE_SECONDS, socket_connect_timeout=PATIENCE_SECONDS
        ) as client:
            pipeline = client.pipeline()
            pipeline.set(name, 0, ex=seconds, nx=True)
            pipeline.incr(name)
            _, count = pipeline.execute()
    except RedisError as error:
        logger.warning("not counted", what=what, error_type=type(error).__name__)
        return True
    return bool(count <= times)
