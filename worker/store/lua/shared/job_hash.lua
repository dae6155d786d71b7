-- Shared head: `job_hash` returns a job's hash for a worker to read. If the hash takes more than `max_hash_bytes` of
-- memory, or has more than `max_hash_fields` fields, it returns only the bytes of memory, as a number.
local bytes_read = 0

-- How many workers have died with a job, and the journal that an earlier execution of it has left, or false.
-- The key tokenmill:deaths:<job> stays until the job is set aside, or no worker has died with it for a week. A field of
-- the job's hash could not be trusted, as producers write there.
local function deaths_and_journal(id)
  local deaths, journal = unpack(call('MGET', 'tokenmill:deaths:' .. id, 'tokenmill:journal:' .. id))
  bytes_read = bytes_read + (journal and #journal or 0)
  return tonumber(deaths or '') or 0, journal
end

-- The pieces of a followed job's text that earlier executions of it have sent.
local function pieces_of(id)
  local is_stream, pieces = tried(call, 'XRANGE', 'tokenmill:text:' .. id, '-', '+')
  if not is_stream then return {} end
  for _, piece in ipairs(pieces) do
    for _, value in ipairs(piece[2]) do bytes_read = bytes_read + #value end
  end
  return pieces
end

local function job_hash(id)
  local job = 'rq:job:' .. id
  local has_many = call('HLEN', job) > max_hash_fields
  local bytes = call('MEMORY', 'USAGE', job, 'SAMPLES', has_many and 5 or 0) or 0
  if has_many or bytes > max_hash_bytes then return bytes end
  bytes_read = bytes_read + bytes
  return call('HGETALL', job)
end
