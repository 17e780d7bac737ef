// The request as code: curl, and Python with the official openai client; steering as the whole study.

const quoted = (text) => `'${text.replaceAll("'", "'\\''")}'`;

export function asCurl(body) {
  return [
    'curl "$ACS_API_BASE/completions" \\',
    '  -H "Authorization: Bearer $ACS_API_KEY" -H "Content-Type: application/json" \\',
    `  -d ${quoted(JSON.stringify(body))}`,
  ].join("\n");
}

// JSON is Python but for these three words; a lone surrogate stays the escape that JSON makes of it.
function literal(value) {
  if (value === null) return "None";
  if (typeof value === "boolean") return value ? "True" : "False";
  if (Array.isArray(value)) return `[${value.map(literal).join(", ")}]`;
  if (typeof value === "object") {
    return `{${Object.entries(value).map(([key, one]) => `${JSON.stringify(key)}: ${literal(one)}`).join(", ")}}`;
  }
  return JSON.stringify(value);
}

const HEAD = [
  "import os",
  "",
  "from openai import OpenAI",
  "",
  'client = OpenAI(base_url=os.environ["ACS_API_BASE"], api_key=os.environ["ACS_API_KEY"])',
];

function call(body, { indent = "", extra = null } = {}) {
  const lines = Object.entries(body).map(([key, value]) => `${indent}    ${key}=${literal(value)},`);
  if (extra) lines.push(`${indent}    extra_body=${extra},`);
  return `client.completions.create(\n${lines.join("\n")}\n${indent})`;
}

export function asPython(body) {
  return [...HEAD, `answer = ${call(body)}`, "print(answer.choices[0].text)", ""].join("\n");
}

// `study`: the prompts `toward` and `away`, `layer`, `where` ("last" or "mean"), `scale` and `normMatch`.
export function steeringAsPython(body, study) {
  const { model, ...rest } = body;
  const position = study.where === "last" ? "[-1]" : "[1:].mean(axis=0)";
  return [
    "import base64",
    "import os",
    "",
    "import numpy as np",
    "import zstandard",
    "from openai import OpenAI",
    "",
    HEAD.at(-1),
    `MODEL, LAYER, SCALE = ${literal(model)}, ${study.layer}, ${study.scale}`,
    "",
    "",
    "def residual_stream(prompt):",
    '    """The residual stream after decoder block LAYER, float32 [tokens, hidden]."""',
    "    answer = client.completions.create(",
    '        model=MODEL, prompt=prompt, max_tokens=1, extra_body={"output_residual_stream": [LAYER]}',
    "    )",
    '    tensor = answer.model_extra["activations"]["residual_stream"]',
    '    data = zstandard.decompress(base64.b64decode(tensor["data"]))',
    '    if tensor["original_dtype"] == "torch.bfloat16":  # the upper half of a float32',
    '        values = (np.frombuffer(data, "<u2").astype("<u4") << 16).view("<f4")',
    "    else:",
    '        values = np.frombuffer(data, {"torch.float16": "<f2"}.get(tensor["original_dtype"], "<f4")).astype("<f4")',
    '    return values.reshape(tensor["shape"])[0]',
    "",
    "",
    `toward = residual_stream(${literal(study.toward)})${position}`,
    `away = residual_stream(${literal(study.away)})${position}`,
    "vector = (toward - away).astype(\"<f4\")",
    "steering = {",
    '    "activations": {',
    '        "data": base64.b64encode(vector.tobytes()).decode(),',
    '        "dtype": "float32",',
    '        "original_dtype": "torch.float32",',
    '        "shape": [1, len(vector)],',
    '        "compression": "none",',
    "    },",
    '    "layer_indices": [LAYER],',
    '    "scale": SCALE,',
    `    "norm_match": ${literal(study.normMatch)},`,
    "}",
    'for name, extra in (("base", {}), ("steered", {"apply_steering_vectors": [steering]})):',
    `    answer = ${call({ model, ...rest }, { indent: "    ", extra: "extra" })}`,
    "    print(name, repr(answer.choices[0].text))",
    "",
  ].join("\n");
}
