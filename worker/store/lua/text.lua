-- Add pieces of followed jobs' texts to their streams. A piece whose execution does not hold its job any more is left
-- out: another one may have begun to go on behind the pieces before it.
-- pieces: {queue, job id, execution id} for each piece. num_values: fields and values of one piece; those of all pieces
-- follow from ARGV[2] on. most: the most pieces of a stream, roughly. ttl_s: how long a stream is kept after its last
-- piece.
local function add(place, queue, id, eid)
  if not holds(queue, id, eid) or call('HGET', 'rq:job:' .. id, 'ended_by') == eid then return end
  local key = 'tokenmill:text:' .. id
  local first = 2 + (place - 1) * args.num_values
  call('XADD', key, 'MAXLEN', '~', args.most, '*', unpack(ARGV, first, first + args.num_values - 1))
  call('EXPIRE', key, args.ttl_s)
end

for place, piece in ipairs(args.pieces) do
  tried(add, place, unpack(piece)) -- fails if the key holds no stream: that costs its own reader the pieces alone
end
