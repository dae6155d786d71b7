-- Queue a job that waits for an ended job and for nothing else, unless another worker has queued it already.
-- ended_id: the job it waited for. ended_as: that job's status at its end; a copy that is saved later may change it.
-- Returns 1 if the job was queued, 0 if not, -1 if it waits for too many jobs, -2 if its dependencies cannot be read.
local id, ended_id, ended_as = args.id, args.ended_id, args.ended_as
local job = 'rq:job:' .. id
local dependencies = 'rq:job::' .. id .. ':dependencies'
if call('TYPE', job).ok ~= 'hash' then return 0 end -- gone, or an id that names another key
if call('HSTRLEN', job, 'origin') > 1024 then return 0 end -- names are short
local queue, at_front_text, bears_text, status = unpack(
  call('HMGET', job, 'origin', 'enqueue_at_front', 'allow_dependency_failures', 'status')
)
local at_front = (tonumber(at_front_text or '') or 0) ~= 0
local bears_failures = (tonumber(bears_text or '') or 0) ~= 0

local function lets_run(status)
  return status == 'finished' or (bears_failures and status == 'failed')
end

-- As in RQ, a job does not wait for jobs that are gone.
local function waits_for_others()
  for _, other in ipairs(call('SMEMBERS', dependencies)) do
    local is_job, status = tried(call, 'HGET', 'rq:job:' .. other, 'status')
    if other ~= ended_id and is_job and status and not lets_run(status) then return true end
  end
  return false
end

local is_set, num_dependencies = tried(call, 'SCARD', dependencies)
if not is_set then return -2 end
if num_dependencies > 10000 then return -1 end -- they would hold up the server
if (queue or '') == '' or not lets_run(ended_as) or waits_for_others() then return 0 end
call('SREM', 'rq:job:' .. ended_id .. ':dependents', id)
if status == 'canceled' and call('ZSCORE', 'rq:canceled:' .. queue, id) then return 0 end
-- Only the call that removes it from the registry queues it. Its status may come from a saved copy.
if call('ZREM', 'rq:deferred:' .. queue, id) == 0 then return 0 end
enqueue(queue, id, at_front, args.now_iso, args.now_ts)
return 1
