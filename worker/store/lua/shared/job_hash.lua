-- Shared head: what a job's hash holds, for a worker to read; the memory it takes, a number, where that is
-- beyond `max_hash_bytes`, or the fields are more than `max_hash_fields`: such a hash leaves the server with none of it.
local bytes_read = 0

-- How many workers have died with a job, and what an earlier execution has left of one of prompts, or false.
-- tokenmill:deaths:<job> is a string, until the job is set aside or nobody has died with it for a week. In the job's
-- hash it would be its producer's word.
local function left_of(id)
  local deaths, journal = unpack(call('MGET', 'tokenmill:deaths:' .. id, 'tokenmill:journal:' .. id))
  bytes_read = bytes_read + (journal and #journal or 0)
  return tonumber(deaths or '') or 0, journal
end

local function job_hash(id)
  local job = 'rq:job:' .. id
  local has_many = call('HLEN', job) > max_hash_fields
  local bytes = call('MEMORY', 'USAGE', job, 'SAMPLES', has_many and 5 or 0) or 0
  if has_many or bytes > max_hash_bytes then return bytes end
  bytes_read = bytes_read + bytes
  return call('HGETALL', job)
end
