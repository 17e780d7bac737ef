from django.db import migrations, models


class Migration(migrations.Migration):
    initial = True
    dependencies = []
    operations = [
        migrations.CreateModel(
            name="StorageFolder",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
                ("url", models.CharField(max_length=1000, unique=True)),
                ("marker", models.CharField(max_length=36)),
                ("host", models.CharField(help_text="Where the API ran that recorded it.", max_length=255)),
                ("recorded_at", models.DateTimeField(auto_now_add=True)),
            ],
        ),
    ]
