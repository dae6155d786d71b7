-- Shared head of finish.lua, retry.lua and close.lua: the fence, and what they write alike.
-- ARGV: queue, job id, execution id, ended_iso, worker key, working_s, then the script's own
local queue, id, eid, ended_iso = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local job, execution = 'rq:job:' .. id, 'rq:execution:' .. id .. ':' .. eid
local wip, member, results = 'rq:wip:' .. queue, id .. ':' .. eid, 'rq:results:' .. id

local function close_execution()
  redis.call('DEL', execution)
  redis.call('ZREM', wip, member)
  redis.call('ZREM', 'rq:executions:' .. id, eid)
end

-- The reply where this execution does not hold the job to end it; then nothing of ours is left behind.
local function not_held()
  if redis.call('ZSCORE', wip, member) then
    if redis.call('HGET', job, 'status') == 'started' then return nil end
    if redis.call('HGET', job, 'ended_by') == eid then return 'dependents' end
  end
  close_execution()
  if redis.call('HGET', job, 'retried_by') == eid then return 'again' end
  local latest = redis.call('XREVRANGE', results, '+', '-', 'COUNT', 1)[1]
  if latest then
    for i = 1, #latest[2], 2 do
      if latest[2][i] == 'execution_id' and latest[2][i + 1] == eid then return 'again' end
    end
  end
  return 'lost'
end

local function count(counter)
  redis.call('HINCRBY', ARGV[5], counter, 1)
  redis.call('HINCRBYFLOAT', ARGV[5], 'total_working_time', ARGV[6])
end

local function expire(ttl)
  local keys = {job, job .. ':dependents', 'rq:job::' .. id .. ':dependencies'}
  if ttl == '-1' then
    redis.call('PERSIST', results)
  elseif ttl == '0' then
    redis.call('DEL', results, unpack(keys))
  elseif ttl ~= '' then
    redis.call('EXPIRE', results, ttl)
    for _, key in ipairs(keys) do redis.call('EXPIRE', key, ttl) end
  end
end
