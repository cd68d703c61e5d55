// Class indices of an index PNG, exactly.
//
// Drawing the PNG on a canvas and reading it back would go through the file's palette, colour management and, with
// privacy settings on, deliberate noise. An index must survive all of these, so the few PNG features in use are read
// here: greyscale or palette, 1 to 8 bits, not interlaced.

const GREY = 0;
const PALETTE = 3;

/** The indices, thinned out (nearest pixel) until no side is longer than `maxSide`. */
export async function decodeIndexPng(base64, maxSide) {
  const bytes = Uint8Array.from(atob(base64), (c) => c.charCodeAt(0));
  const { width, height, depth, data } = readChunks(bytes);
  const stream = new Blob(data).stream().pipeThrough(new DecompressionStream("deflate"));
  const rows = new Uint8Array(await new Response(stream).arrayBuffer());
  const stride = Math.ceil((width * depth) / 8);
  if (rows.length < height * (stride + 1)) throw new Error("the mask is cut short");
  unfilter(rows, height, stride);
  return thin({ rows, stride, width, height, depth }, maxSide);
}

function readChunks(bytes) {
  const view = new DataView(bytes.buffer);
  const header = { data: [] };
  let at = 8; // after the signature
  while (at + 12 <= bytes.length) {
    const length = view.getUint32(at);
    const type = String.fromCharCode(...bytes.subarray(at + 4, at + 8));
    const body = at + 8;
    if (type === "IHDR") {
      header.width = view.getUint32(body);
      header.height = view.getUint32(body + 4);
      header.depth = bytes[body + 8];
      const colour = bytes[body + 9];
      const interlaced = bytes[body + 12] !== 0;
      if ((colour !== GREY && colour !== PALETTE) || header.depth > 8 || interlaced) {
        throw new Error(`the mask is not an index PNG (colour type ${colour}, ${header.depth} bits)`);
      }
    } else if (type === "IDAT") {
      header.data.push(bytes.subarray(body, body + length));
    } else if (type === "IEND") {
      break;
    }
    at = body + length + 4; // the checksum is left to the transport
  }
  if (!header.width || !header.data.length) throw new Error("the mask is not a PNG");
  return header;
}

/** Undo the five line filters in place (PNG, section 9). Pixels are a byte or less, so "left" is one byte away. */
function unfilter(rows, height, stride) {
  for (let y = 0; y < height; y++) {
    const start = y * (stride + 1) + 1;
    const above = y > 0 ? start - stride - 1 : -1;
    const filter = rows[start - 1];
    if (filter === 0) continue;
    for (let x = 0; x < stride; x++) {
      const left = x > 0 ? rows[start + x - 1] : 0;
      const up = above >= 0 ? rows[above + x] : 0;
      const corner = x > 0 && above >= 0 ? rows[above + x - 1] : 0;
      rows[start + x] += predicted(filter, left, up, corner);
    }
  }
}

function predicted(filter, left, up, corner) {
  if (filter === 1) return left;
  if (filter === 2) return up;
  if (filter === 3) return (left + up) >> 1;
  const toLeft = Math.abs(up - corner);
  const toUp = Math.abs(left - corner);
  const toCorner = Math.abs(left + up - 2 * corner);
  if (toLeft <= toUp && toLeft <= toCorner) return left;
  return toUp <= toCorner ? up : corner;
}

function thin({ rows, stride, width, height, depth }, maxSide) {
  const scale = Math.min(1, maxSide / Math.max(width, height));
  const w = Math.max(1, Math.round(width * scale));
  const h = Math.max(1, Math.round(height * scale));
  const indices = new Uint8Array(w * h);
  const perByte = 8 / depth;
  const bitMask = (1 << depth) - 1;
  for (let y = 0; y < h; y++) {
    const start = Math.floor(((y + 0.5) * height) / h) * (stride + 1) + 1;
    for (let x = 0; x < w; x++) {
      const column = Math.floor(((x + 0.5) * width) / w);
      const byte = rows[start + Math.floor(column / perByte)];
      indices[y * w + x] = depth === 8 ? byte : (byte >> (8 - depth * ((column % perByte) + 1))) & bitMask;
    }
  }
  return { indices, width: w, height: h };
}
