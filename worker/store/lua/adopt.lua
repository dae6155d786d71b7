-- Take over a job that one of RQ's own workers left behind. The caller then holds it by the execution `new_eid`, to
-- end it. eid is '' for a job in the intermediate queue.
-- Returns
--   {'taken', claimed};
--   {'alive'} if the job's worker has shown a sign of life since the caller looked;
--   {'dropped'} if the job has ended, waits elsewhere, or is gone. Only the trace of its worker is removed then.
local queue, id, eid = args.queue, args.id, args.eid
local job = 'rq:job:' .. id
local intermediate = 'rq:queue:' .. queue .. ':intermediate'

if eid == '' then
  if call('LREM', intermediate, 1, id) == 0 then return {'alive'} end
  call('DEL', intermediate .. ':first_seen:' .. id)
else
  local score = tonumber(call('ZSCORE', 'rq:wip:' .. queue, id .. ':' .. eid) or '')
  if not score or score < 0 or score > tonumber(args.now_ts) then return {'alive'} end
  let_go(queue, id, eid)
end

-- A saved copy may have brought any status back. A job needs nobody only if the registry of its status lists it.
local registries = {
  finished = 'rq:finished:', failed = 'rq:failed:', stopped = 'rq:failed:', canceled = 'rq:canceled:',
  scheduled = 'rq:scheduled:', deferred = 'rq:deferred:', ready_to_enqueue = 'rq:ready:'
}
local function needs_nobody()
  local status = call('HGET', job, 'status')
  local limit = status == 'rate_limited' and call('HGET', job, 'rate_limit_key')
  if limit then return call('ZSCORE', 'rq:rl:' .. limit .. ':rate_limited', id) end
  if not status or call('ZCARD', 'rq:executions:' .. id) > 0 then return true end
  if status == 'queued' then return call('LPOS', 'rq:queue:' .. queue, id) end
  return registries[status] and call('ZSCORE', registries[status] .. queue, id) or false
end

if needs_nobody() then return {'dropped'} end
return {'taken', open_execution(queue, id, args.new_eid)}
