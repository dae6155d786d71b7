-- Shared head of all scripts: who holds a job, jobs whose keys are damaged, and time in the queue.
-- An execution holds its job while both its queue's registry and the job's own list it: enqueued again
-- under the same id, a job belongs to the newest execution alone.
local function holds(queue, id, eid)
  return redis.call('ZSCORE', 'rq:wip:' .. queue, id .. ':' .. eid)
    and redis.call('ZSCORE', 'rq:executions:' .. id, eid)
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
