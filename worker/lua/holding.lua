-- Shared head of all scripts: who holds a job, jobs whose keys are damaged, and time in the queue.
-- tokenmill:held:<queue> has a field '<job>:<execution>' for each open execution of ours. Its value keeps two
-- facts of the moment of the claim, '<score>|<enqueued_at>': the job's score in rq:canceled, where a job that
-- is enqueued again stays listed, and which enqueueing the execution answers.
-- An execution holds its job while that hash and the job's own registry list it, and the job exists and was
-- not cancelled since. Enqueued again under the same id, a job belongs to the newest execution alone.
-- The job's hash decides nothing: anyone's job.save() rewrites it, with a copy of any age.
local function at_claim(queue, id, eid)
  local value = redis.call('HGET', 'tokenmill:held:' .. queue, id .. ':' .. eid)
  if not value then return nil end
  return string.match(value, '^(.-)|(.*)$')
end

-- False, or the `enqueued_at` that the execution answers ('' for none).
local function holds(queue, id, eid)
  local cancelled_before, taken_at = at_claim(queue, id, eid)
  if not cancelled_before or not redis.call('ZSCORE', 'rq:executions:' .. id, eid) then return false end
  local cancelled = redis.call('ZSCORE', 'rq:canceled:' .. queue, id)
  if cancelled and cancelled ~= cancelled_before then return false end
  return redis.call('EXISTS', 'rq:job:' .. id) == 1 and taken_at
end

-- Leave nothing of an execution behind.
local function let_go(queue, id, eid)
  redis.call('HDEL', 'tokenmill:held:' .. queue, id .. ':' .. eid)
  redis.call('ZREM', 'rq:wip:' .. queue, id .. ':' .. eid)
  redis.call('DEL', 'rq:execution:' .. id .. ':' .. eid)
  redis.pcall('ZREM', 'rq:executions:' .. id, eid)
end

-- Whether the job stands in a queue once more, because it was enqueued again since it was taken (see `holds`).
-- Looked for only where its `enqueued_at` is another one: the queue may be long.
local function is_queued_again(queue, id, taken_at)
  local fields = redis.call('HMGET', 'rq:job:' .. id, 'enqueued_at', 'origin')
  if taken_at == (fields[1] or '') then return false end
  return redis.call('LPOS', 'rq:queue:' .. queue, id)
    or redis.call('LPOS', 'rq:queue:' .. (fields[2] or queue), id)
end

-- The value of f(...), nil where it met a key of another type. Any other error may be the server's own
-- state, such as a full memory, and is worth another try.
local function guarded(f, ...)
  local ok, value = pcall(f, ...)
  if ok then return value end
  local text = type(value) == 'table' and value.err or value
  if not string.find(text, 'WRONGTYPE', 1, true) then error(value) end
  return nil
end

-- A job's own ttl bounds its time in the queue.
local function expire_in_queue(job, ttl)
  local ttl_s = tonumber(ttl or '')
  if ttl_s and ttl_s >= 1 then redis.call('EXPIRE', job, math.floor(math.min(ttl_s, 315360000))) end
end
