// Tensor objects of the API, decoded and made: base64, zstd, bfloat16 and float32.

import { decompress } from "./vendor/fzstd-0.1.1.js";

function bytesOf(base64) {
  return Uint8Array.from(atob(base64), (character) => character.charCodeAt(0));
}

function base64Of(bytes) {
  let text = "";
  for (let at = 0; at < bytes.length; at += 8192) text += String.fromCharCode(...bytes.subarray(at, at + 8192));
  return btoa(text);
}

// Little-endian values of the tensor, as float32: bfloat16 is the upper half of a float32's bits.
function valuesOf(tensor) {
  let bytes = bytesOf(tensor.data);
  if (tensor.compression === "zstd") bytes = decompress(bytes);
  const view = new DataView(bytes.buffer, bytes.byteOffset, bytes.byteLength);
  if (tensor.dtype === "float32") {
    return Float32Array.from({ length: bytes.length / 4 }, (_, at) => view.getFloat32(at * 4, true));
  }
  const bits = new DataView(new ArrayBuffer(4));
  const widened = (half) => { bits.setUint32(0, half << 16); return bits.getFloat32(0); };
  const read = tensor.original_dtype === "torch.float16"
    ? (at) => view.getFloat16(at, true)
    : (at) => widened(view.getUint16(at, true));
  return Float32Array.from({ length: bytes.length / 2 }, (_, at) => read(at * 2));
}

// The residual stream of one prompt: `at(row, position)` is a vector [hidden] of the row-th captured layer.
export function residualStream(tensor) {
  const [layers, tokens, hidden] = tensor.shape;
  const values = valuesOf(tensor);
  const at = (row, position) => {
    const start = (row * tokens + position) * hidden;
    return values.subarray(start, start + hidden);
  };
  return { layers, tokens, hidden, at };
}

// The vector of a prompt at a captured layer: of its last token, or the mean of all but the first, whose massive
// activations would drown the rest (a prompt of one token has only that).
export function vectorOf(stream, row, where) {
  if (where === "last" || stream.tokens === 1) return Float32Array.from(stream.at(row, stream.tokens - 1));
  const mean = new Float32Array(stream.hidden);
  for (let position = 1; position < stream.tokens; position += 1) {
    stream.at(row, position).forEach((value, index) => { mean[index] += value / (stream.tokens - 1); });
  }
  return mean;
}

export function difference(one, other) {
  return one.map((value, index) => value - other[index]);
}

export function norm(vector) {
  return Math.sqrt(vector.reduce((sum, value) => sum + value * value, 0));
}

// A steering vector of the API: the same at every position, at one layer.
export function steeringVector(vector, layer, scale, normMatch) {
  const bytes = new DataView(new ArrayBuffer(vector.length * 4));
  vector.forEach((value, index) => bytes.setFloat32(index * 4, value, true));
  return {
    activations: {
      data: base64Of(new Uint8Array(bytes.buffer)),
      dtype: "float32",
      original_dtype: "torch.float32",
      shape: [1, vector.length],
      compression: "none",
    },
    layer_indices: [layer],
    scale,
    norm_match: normMatch,
  };
}
