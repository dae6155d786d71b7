-- Add pieces of followed jobs' texts to their streams. A piece whose execution was let go of is left out: another one
-- may have begun to go on behind the pieces before it.
-- pieces: {queue, job id, execution id, whether it is the first one of a text} for each piece. num_values: fields and
-- values of one piece; those of all pieces follow from ARGV[2] on. most: the most pieces of a stream, roughly.
-- ttl_s: how long a stream is kept after a text's first piece, if its job does not end.
local num_values, most, ttl_s = args.num_values, args.most, args.ttl_s

local function add(first, queue, id, eid, is_first)
  if not is_open(queue, id, eid) then return end
  local key = 'tokenmill:text:' .. id
  call('XADD', key, 'MAXLEN', '~', most, '*', unpack(ARGV, first, first + num_values - 1))
  if is_first then call('EXPIRE', key, ttl_s) end
end

for place, piece in ipairs(args.pieces) do
  -- It fails if the key holds no stream. Then only the reader of this job's text misses the piece.
  tried(add, 2 + (place - 1) * num_values, unpack(piece))
end
