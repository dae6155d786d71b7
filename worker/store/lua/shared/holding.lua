local call, args = redis.call, cjson.decode(ARGV[1]) -- raw bytes follow from ARGV[2] on

-- Shared head of all scripts: who holds a job, and time in the queue.

-- Call a function about one of several jobs. Returns true and the function's reply, or false if a key of that job holds
-- another kind of value than RQ writes. That is no reason to stop for the other jobs.
local function tried(about, ...)
  local could, reply = pcall(about, ...)
  if could then return true, reply end
  local text = type(reply) == 'table' and reply.err or tostring(reply)
  if not string.find(text, 'WRONGTYPE', 1, true) then error(reply, 0) end
  return false
end

-- tokenmill:held:<queue> has a field '<job>:<execution>' for each open execution of ours. Its value keeps two facts of
-- the moment of the claim, '<score>|<enqueued_at>'. The first is the job's score in rq:canceled, where a cancelled job
-- stays listed when it is enqueued again. The second says which enqueueing the execution serves.
-- An execution holds its job while this hash and the job's own registry list it, and the job exists and was not
-- cancelled since. A job that was enqueued again under its id belongs to the newest execution alone.
-- The job's hash decides nothing, because anyone's job.save() rewrites it with a copy of any age.
local function at_claim(queue, id, eid)
  local value = call('HGET', 'tokenmill:held:' .. queue, id .. ':' .. eid)
  if not value then return nil end
  return string.match(value, '^(.-)|(.*)$')
end

local function write_claim(queue, id, eid)
  local facts = (call('ZSCORE', 'rq:canceled:' .. queue, id) or '')
    .. '|' .. (call('HGET', 'rq:job:' .. id, 'enqueued_at') or '')
  call('HSET', 'tokenmill:held:' .. queue, id .. ':' .. eid, facts)
end

-- Whether nobody has let go of an execution.
local function is_open(queue, id, eid)
  return call('HEXISTS', 'tokenmill:held:' .. queue, id .. ':' .. eid) == 1
end

-- Whether there is a job. A key that holds something else is no job.
local function exists(id)
  local is_hash, num_fields = tried(call, 'HLEN', 'rq:job:' .. id)
  return is_hash and num_fields > 0
end

-- False if the execution does not hold the job; else the `enqueued_at` that it serves, '' for none.
local function holds(queue, id, eid)
  local _, is_listed = tried(call, 'ZSCORE', 'rq:executions:' .. id, eid)
  if not is_listed then return false end
  local cancelled_before, taken_at = at_claim(queue, id, eid)
  if not cancelled_before then return false end
  local cancelled = call('ZSCORE', 'rq:canceled:' .. queue, id)
  if cancelled and cancelled ~= cancelled_before then return false end
  return exists(id) and taken_at
end

-- Leave nothing of an execution behind, whatever its keys hold. Otherwise workers would let go of it again and again.
-- worker: the execution's worker, if known.
local function let_go(queue, id, eid, worker)
  call('HDEL', 'tokenmill:held:' .. queue, id .. ':' .. eid)
  call('ZREM', 'rq:wip:' .. queue, id .. ':' .. eid)
  local execution = 'rq:execution:' .. id .. ':' .. eid
  local _, holder = tried(call, 'HGET', execution, 'worker_name')
  worker = worker or holder
  if worker then call('SREM', 'rq:worker:' .. worker .. ':executions', id .. ':' .. eid) end
  call('DEL', execution)
  tried(call, 'ZREM', 'rq:executions:' .. id, eid)
end

-- Let go of a job that this execution does not hold any more. If the job was deleted or cancelled, its journal and its
-- text are deleted too, as nobody goes on with it.
local function let_go_of_lost(queue, id, eid, worker)
  local cancelled_before = at_claim(queue, id, eid)
  local cancelled = call('ZSCORE', 'rq:canceled:' .. queue, id)
  local is_cancelled = cancelled and cancelled_before and cancelled ~= cancelled_before
  if is_cancelled or not exists(id) then call('DEL', 'tokenmill:journal:' .. id, 'tokenmill:text:' .. id) end
  let_go(queue, id, eid, worker)
end

-- Whether the job stands in a queue once more, because it was enqueued again after it was taken (see `holds`).
-- The queue may be long, so it is searched only if the job's `enqueued_at` has changed.
local function is_queued_again(queue, id, taken_at)
  local enqueued_at, origin = unpack(call('HMGET', 'rq:job:' .. id, 'enqueued_at', 'origin'))
  if taken_at == (enqueued_at or '') then return false end
  return call('LPOS', 'rq:queue:' .. queue, id)
    or call('LPOS', 'rq:queue:' .. (origin or queue), id)
end

-- A job's own ttl bounds its time in the queue.
local function expire_in_queue(job, ttl)
  local ttl_s = tonumber(ttl or '')
  if ttl_s and ttl_s >= 1 then call('EXPIRE', job, math.floor(math.min(ttl_s, 315360000))) end
end
