-- Shared head of finish.lua, retry.lua and close.lua: the check that the execution holds the job, and common writes.
-- Each script has these arguments beside its own, and then those of `add_result`.
local queue, id, eid, worker = args.queue, args.id, args.eid, args.worker
local ended_iso, started_iso = args.ended_iso, args.started_iso
local job = 'rq:job:' .. id
local results = 'rq:results:' .. id
-- Kept for a while after a job was deleted at its end, for a caller whose reply was lost.
local removed_by = 'tokenmill:removed:' .. eid
local removed_by_ttl_s = 120
local rate_limit_key -- set by `not_held` if the job is held

local function was_ended_before()
  if call('EXISTS', removed_by) == 1 then return true end
  local _, closed_by = tried(call, 'HGET', job, 'closed_by')
  if closed_by == eid then return true end
  local is_stream, latest = tried(call, 'XREVRANGE', results, '+', '-', 'COUNT', 1)
  local entry = is_stream and latest[1]
  if not entry then return false end
  local fields = entry[2] -- names and values in turn
  for i = 1, #fields, 2 do
    if fields[i] == 'execution_id' and fields[i + 1] == eid then return true end
  end
  return false
end

-- The reply if this execution does not hold the job; nothing of the execution is left behind then. Else nil.
local function not_held()
  local taken_at = holds(queue, id, eid)
  if taken_at then
    local ended_by
    ended_by, rate_limit_key = unpack(call('HMGET', job, 'ended_by', 'rate_limit_key'))
    if ended_by == eid then return 'dependents' end
    if not is_queued_again(queue, id, taken_at) then return nil end
  end
  let_go_of_lost(queue, id, eid, worker)
  return was_ended_before() and 'again' or 'lost'
end

local function count(counter)
  call('HINCRBY', 'rq:worker:' .. worker, counter, 1)
  call('HINCRBYFLOAT', 'rq:worker:' .. worker, 'total_working_time', args.working_s)
end

-- Write what RQ writes about a try, and one more field. Copies of the job may have been saved while it ran.
local function write_run(name, value)
  -- These keys belong to the try that ends here. A reader of the text has all of it in the result.
  call('DEL', 'tokenmill:journal:' .. id, 'tokenmill:deaths:' .. id, 'tokenmill:text:' .. id)
  call(
    'HSET', job, 'started_at', started_iso, 'ended_at', ended_iso, 'last_heartbeat', ended_iso,
    'worker_name', worker, name, value
  )
end

-- Add an entry with the fields and values in ARGV to rq:results. If there are none, a field of the job says that this
-- execution has ended it.
local function add_result()
  if #ARGV > 1 then
    local reply = redis.pcall('XADD', results, 'MAXLEN', '~', 10, '*', unpack(ARGV, 2))
    if not (type(reply) == 'table' and reply.err) then return end
    if string.find(reply.err, '^OOM') then error(reply, 0) end
    call('DEL', results) -- it is no stream, or its last id is the highest possible one
    call('XADD', results, '*', unpack(ARGV, 2))
  else
    call('HSET', job, 'closed_by', eid)
  end
end

local function expire_results(ttl)
  if ttl == '-1' then call('PERSIST', results) elseif ttl ~= '' then call('EXPIRE', results, ttl) end
end

-- Queue the job again if `when` is 'front' or 'back', or schedule it for `when` in Unix seconds.
local function put_back(when)
  call('SADD', 'rq:queues', 'rq:queue:' .. queue)
  call('HSET', job, 'closed_by', eid)
  if when == 'front' or when == 'back' then
    call('HSET', job, 'status', 'queued', 'enqueued_at', ended_iso)
    call(when == 'front' and 'LPUSH' or 'RPUSH', 'rq:queue:' .. queue, id)
  else
    call('HSET', job, 'status', 'scheduled')
    call('ZADD', 'rq:scheduled:' .. queue, when, id)
  end
  expire_in_queue(job, call('HGET', job, 'ttl'))
end

local function remove(keys)
  local group = call('HGET', job, 'group_id')
  if group then tried(call, 'SREM', 'rq:group:' .. group, id) end
  call('DEL', results, unpack(keys))
  call('SET', removed_by, id, 'EX', removed_by_ttl_s)
end

-- Free the slot of a job with a rate limit, unless the job is queued again at the 'front' or 'back'.
local function leave_slot(when)
  if rate_limit_key and when ~= 'front' and when ~= 'back' then tried(free_slot, rate_limit_key, id, ended_iso) end
end

-- Whether the job runs once more because it was scheduled or deferred under its id while it ran.
local function runs_later()
  local origin = call('HGET', job, 'origin') or queue
  return call('ZSCORE', 'rq:scheduled:' .. origin, id) or call('ZSCORE', 'rq:deferred:' .. origin, id)
end

-- Settle what becomes of an ended job. If `next_run` is not '', the job runs again then, with `repeats_left`. Otherwise
-- it is kept for `ttl` seconds, and so is the key `dependents`, if given.
local function settle(ttl, next_run, repeats_left, dependents)
  local keys = {job, 'rq:job::' .. id .. ':dependencies', dependents}
  if next_run ~= '' then
    call('HSET', job, 'repeats_left', repeats_left)
    local intervals = call('HGET', job, 'repeat_intervals') -- each serves once, the last one ever after
    if intervals then call('HSET', job, 'repeat_intervals', (string.gsub(intervals, '^%s*%[[^,%]]*,%s*', '['))) end
    expire_results(ttl)
    put_back(next_run)
  elseif runs_later() then
    expire_results(ttl)
  elseif ttl == '0' then
    remove(keys)
  else
    expire_results(ttl)
    for _, key in ipairs(keys) do
      if ttl ~= '' and ttl ~= '-1' then call('EXPIRE', key, ttl) end
    end
  end
  let_go(queue, id, eid, worker)
end
