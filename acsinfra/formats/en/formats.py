"""How the admin shows dates: as the App and the API do. Django takes a language's own formats before the settings'."""

DATE_FORMAT = "Y-m-d"
DATETIME_FORMAT = "Y-m-d H:i:s"
